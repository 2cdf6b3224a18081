"""Runs an outer graph: few operators and loops, each value dropped after its last use."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from streamfx.errors import StaleGraph
from streamfx.runtime.mask_programs import MaskProgram

aten = torch.ops.aten
COPIES_WHERE_NEEDED: dict[Any, Any] = {aten.view.default: aten.reshape.default, aten._unsafe_view.default: aten.reshape.default}


class OuterInterpreter(fx.Interpreter):
    """Calls loops as functions: hooks that somebody set on all modules (FLOP counters do) expect gradients inside."""

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.fetch_attr(target).forward(*args, **kwargs)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Views copy where they have to: kernels may lay a result out in another way than their fake counterparts promised."""
        return super().call_function(COPIES_WHERE_NEEDED.get(target, target), args, kwargs)


def _savable(result: Any) -> Any:
    """Autograd saves no tensors that were made in inference mode, as some libraries make their packed weights."""
    return result.clone() if isinstance(result, torch.Tensor) and result.is_inference() else result


class OuterRunner:
    """A boxed callable: takes one list of inputs, empties it, returns the outputs."""

    def __init__(self, module: fx.GraphModule, checks_gradients: bool = False) -> None:
        self.module = module
        self._checks_gradients = checks_gradients
        self._flags: tuple[bool, ...] | None = None
        self._interpreter = OuterInterpreter(module)
        self._masks = [child for child in module.modules() if isinstance(child, MaskProgram)]
        self._boxed_call = True  # on the instance: torch._dynamo.disable copies no class attributes

    def __call__(self, arguments: list[Any]) -> Any:
        if self._checks_gradients:
            self._check_gradients(arguments)
            self._forget_masks()  # a step begins
        with torch.no_grad():
            try:
                results = self._interpreter.boxed_run(arguments)
                return [_savable(result) for result in results] if self._checks_gradients else results
            finally:
                self._interpreter.env = {}  # it would keep the results, and with them all that is saved, until the next run
                if not self._checks_gradients:
                    self._forget_masks()  # a step ends

    def _forget_masks(self) -> None:
        for mask in self._masks:
            mask.forget()

    def _check_gradients(self, arguments: list[Any]) -> None:
        """Refuse inputs that ask for gradients which the graph was not compiled for (torch 2.11 does not notice them)."""
        flags = tuple(isinstance(argument, torch.Tensor) and argument.requires_grad for argument in arguments)
        if self._flags is None:
            self._flags = flags
        if flags != self._flags and any(now and not then for now, then in zip(flags, self._flags, strict=True)):
            names = [node.name for node in self.module.graph.find_nodes(op="placeholder")]
            late = [n for n, now, then in zip(names, flags, self._flags, strict=False) if now and not then]
            raise StaleGraph(
                "a parameter asks for a gradient that the compiled graph does not compute",
                found=f"requires_grad was switched on after compilation for {', '.join(late)}",
                do="call torch._dynamo.reset() after requires_grad_(True), so that the model is compiled again",
            )
