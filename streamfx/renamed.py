"""Old names of public classes, functions and attributes: they work and warn, as docs/renamed.md lists them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

RENAMED = {  # names of the package `streamfx`
    "Enabled": "EnabledModules",
    "NoRoom": "OffloadSpaceError",
    "NotComparable": "NotComparableError",
    "NotStreamed": "NotStreamedError",
    "NotTraced": "NotTracedError",
    "OverBudget": "OverBudgetError",
    "RanksDiffer": "RanksDifferError",
    "StaleGraph": "StaleGraphError",
    "StaleOutput": "StaleOutputError",
    "TurnedOutput": "TransposedOutputError",
}


class RenamedAttributes:
    """A base class of public classes: an attribute's old name, a key of `renamed`, warns and returns the new one's value."""

    renamed: ClassVar[Mapping[str, str]] = {}

    def __getattr__(self, name: str) -> Any:
        """Return the attribute with the new name; Python calls this method only for names that do not exist."""
        owner = type(self).__name__
        if name not in self.renamed:
            raise AttributeError(f"{owner!r} object has no attribute {name!r}")
        warn_renamed(f"{owner}.{name}", f"{owner}.{self.renamed[name]}")
        return getattr(self, self.renamed[name])


def warn_renamed(old: str, new: str) -> None:
    """Warn that the caller's caller uses an old name."""
    warnings.warn(f"{old} is now {new}", DeprecationWarning, stacklevel=3)
