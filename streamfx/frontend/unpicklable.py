"""A base class for objects that are bound to their process."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

from streamfx.errors import NotCopyableError, with_article


class Unpicklable:
    """Base of results that hold graphs and functions, which cannot be pickled or copied.

    `_keep` is the remedy in the error: the text or value to keep instead.
    """

    _keep: ClassVar[str]

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise `NotCopyableError`: `pickle` and `copy` call this method."""
        asked = f"{with_article(type(self).__name__)} cannot be pickled or copied"
        raise NotCopyableError(asked, found="it holds graphs and functions of this process", do=self._keep)
