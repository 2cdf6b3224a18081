"""What belongs to the process that made it."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

from streamfx.errors import NotCopyableError, one


class Unpicklable:
    """Holds graphs and functions, which are neither pickled nor copied: whoever tries is told what to keep in its place."""

    _keep: ClassVar[str]

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        asked = f"{one(type(self).__name__)} is neither pickled nor copied"
        raise NotCopyableError(asked, found="graphs and functions of this process", do=self._keep)
