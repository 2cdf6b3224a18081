"""Runs an outer graph: few operators and loops, each value dropped after its last use."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


class _Interpreter(fx.Interpreter):
    """Calls loops as functions: hooks that somebody set on all modules (FLOP counters do) expect gradients inside."""

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.fetch_attr(target).forward(*args, **kwargs)


class OuterRunner:
    """A boxed callable: takes one list of inputs, empties it, returns the outputs."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self._interpreter = _Interpreter(module)
        self._boxed_call = True  # on the instance: torch._dynamo.disable copies no class attributes

    def __call__(self, arguments: list[Any]) -> Any:
        with torch.no_grad():
            return self._interpreter.boxed_run(arguments)
