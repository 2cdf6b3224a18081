"""Runs an outer graph: few operators and loops, each value dropped after its last use."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


class OuterRunner:
    """A boxed callable: takes one list of inputs, empties it, returns the outputs."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self._interpreter = fx.Interpreter(module)
        self._boxed_call = True  # on the instance: torch._dynamo.disable copies no class attributes

    def __call__(self, arguments: list[Any]) -> Any:
        with torch.no_grad():
            try:
                return self._interpreter.boxed_run(arguments)
            finally:
                self._interpreter.env = {}  # it would keep the results, and with them all that is saved, until the next run
