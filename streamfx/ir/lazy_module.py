"""Graphs whose Python is written when they are first called: most are changed once more, interpreted, or compiled instead."""

from __future__ import annotations

import threading
from typing import Any

from torch import fx

_WRITING = threading.RLock()


class LazyGraphModule(fx.GraphModule):
    """A `GraphModule` that does the work of `recompile` in its first call.

    Each `GraphModule` has a class of its own, whose `forward` that Python is.
    """

    def recompile(self) -> Any:
        """Forget the Python of the graph as it was."""
        if "forward" in vars(type(self)):
            del type(self).forward

    def forward(self, *arguments: Any) -> Any:
        with _WRITING:
            if "forward" not in vars(type(self)):
                super().recompile()
        return type(self).forward(self, *arguments)
