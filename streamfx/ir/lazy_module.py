"""Graph modules that generate their Python code at the first call: most are rewritten or compiled, and never called."""

from __future__ import annotations

import threading
from typing import Any

from torch import fx

_GENERATION_LOCK = threading.RLock()


class LazyGraphModule(fx.GraphModule):
    """A `GraphModule` that runs `recompile` at its first call.

    Each `GraphModule` has its own class, whose `forward` is the generated code.
    """

    def recompile(self) -> Any:
        """Discard the generated code."""
        if "forward" in vars(type(self)):
            del type(self).forward

    def forward(self, *arguments: Any) -> Any:
        """Generate the code at the first call, which replaces this method in the instance's class, and run it."""
        with _GENERATION_LOCK:
            if "forward" not in vars(type(self)):
                super().recompile()
        return type(self).forward(self, *arguments)


class HostProgramModule(LazyGraphModule):
    """The graph of a host program."""

    def __deepcopy__(self, memo: dict[int, Any]) -> HostProgramModule:
        """Return itself: AOTAutograd copies a backward graph for compilers that change it, and ours does not."""
        return self
