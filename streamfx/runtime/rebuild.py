"""Runs a recipe later as it would have run in the call: same values, same modes, gradients to the same places."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch.autograd.graph import GradientEdge, get_gradient_edge

from streamfx.errors import StaleOutput
from streamfx.fingerprint import Fingerprint
from streamfx.ir.recipe import Context, GivenSize, Program, Recipe
from streamfx.torch_private import no_saved_tensor_hooks


@dataclass(frozen=True)
class Modes:
    """The modes of a call that decide what a torch function does."""

    grad: bool
    inference: bool
    autocasts: tuple[tuple[str, torch.dtype, bool], ...]  # device type, type, whether it is on

    @staticmethod
    def now(device: torch.device) -> Modes:
        types = [name for name in dict.fromkeys(("cpu", device.type)) if torch.amp.is_autocast_available(name)]
        autocasts = ((name, torch.get_autocast_dtype(name), torch.is_autocast_enabled(name)) for name in types)
        return Modes(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), tuple(autocasts))

    @contextmanager
    def restored(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self.inference != torch.is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for name, dtype, enabled in self.autocasts:
                if enabled or torch.is_autocast_enabled(name):
                    stack.enter_context(torch.autocast(name, dtype=dtype, enabled=enabled, cache_enabled=False))
            yield


class _Runner(fx.Interpreter):
    """Runs a program, each operator under the modes that the graph had set for it."""

    def __init__(self, program: Program) -> None:
        super().__init__(torch.nn.Module(), graph=program.graph)
        self.contexts: Mapping[fx.Node, Context] = program.contexts

    def run_node(self, n: fx.Node) -> Any:
        context = self.contexts.get(n)
        if context is None:
            return super().run_node(n)
        with ExitStack() as stack:
            for arguments in context.autocasts:
                stack.enter_context(torch.autocast(*arguments))
            if context.grad is not None:
                stack.enter_context(torch.set_grad_enabled(context.grad))
            return super().run_node(n)


def run_program(program: Program, values: Sequence[Any]) -> Any:
    return _Runner(program).run(*values)


@dataclass
class _Kept:
    """A tensor that a recipe reads, and what it held when the call ended. `tensor` has the same memory and version."""

    name: str
    tensor: Tensor
    requires_grad: bool
    seen: Fingerprint

    @staticmethod
    def of(name: str, tensor: Tensor) -> _Kept:
        alias = tensor.detach()
        return _Kept(name, alias, tensor.requires_grad, Fingerprint.of(alias))


@dataclass(frozen=True)
class _Tape:
    """One run with gradients: where they come in, and the leaves that they reach."""

    output: GradientEdge
    leaves: tuple[Tensor | None, ...]


# Compiles a graph for inputs of which those at some positions are weights, so that it makes nothing of half as many elements as
# given but its results; None where that is not possible.
UseCompiler: TypeAlias = "Callable[[fx.GraphModule, list[Any], list[int], int], Callable[..., Any] | None]"


class Source:
    """What one deferred tensor is rebuilt from. Holds only the tensors that the recipe reads."""

    def __init__(self, recipe: Recipe, values: Sequence[Any], compiler: UseCompiler | None = None) -> None:
        self.recipe, self.compiler = recipe, compiler
        self.modes = Modes.now(recipe.device)
        self._values: list[Any] = [
            value if isinstance(given, GivenSize) else _Kept.of(given.name, value)
            for given, value in zip(recipe.program.given, values, strict=True)
        ]
        self._tapes: list[_Tape] = []  # at most one; taken out by whoever runs it: several threads may ask

    @property
    def differentiable(self) -> bool:
        return self.recipe.requires_grad and self.modes.grad

    @property
    def is_rebuilt(self) -> bool:
        """Whether the dense tensor was made, and what its gradient needs is kept."""
        return bool(self._tapes)

    def leaves(self) -> list[int]:
        """Positions of the given values that gradients are asked for."""
        kept = enumerate(self._values)
        return [i for i, value in kept if self.differentiable and isinstance(value, _Kept) and value.requires_grad]

    def rebuild(self) -> Tensor:
        """The dense tensor, outside of autograd; what its gradient needs is kept beside it."""
        output, tape = self._recorded()
        self._tapes[:] = [] if tape is None else [tape]
        return output

    def has_rows(self, dim: int) -> bool:
        """Whether rows along a dimension can be made by themselves."""
        return self.recipe.rows is not None and self.recipe.rows.dims[dim] is not None

    def rebuild_rows(self, ranges: Mapping[int, range]) -> Tensor:
        """The dense tensor restricted to ranges of some of its rows, outside of autograd."""
        rows = self.recipe.rows
        assert rows is not None
        values = self.current()
        given = values[rows.given]
        index = [slice(None)] * given.dim()
        for dim, wanted in ranges.items():
            place = rows.dims[dim]
            assert place is not None
            index[place] = slice(wanted.start, wanted.stop, wanted.step)
        values[rows.given] = given[tuple(index)]
        with self.modes.restored(), torch.no_grad():
            output: Tensor = run_program(self.recipe.program, values)
        return output

    def gradients(self, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of what the recipe reads, one for each given value. Runs the recipe again where it has to."""
        try:
            tape: _Tape | None = self._tapes.pop()
        except IndexError:
            tape = self._recorded()[1]
        if tape is None:
            return (None,) * len(self._values)
        reached = [leaf for leaf in tape.leaves if leaf is not None]
        found = iter(torch.autograd.grad([tape.output], reached, [gradient], allow_unused=True))
        return tuple(None if leaf is None else next(found) for leaf in tape.leaves)

    def _recorded(self) -> tuple[Tensor, _Tape | None]:
        values = self.current()
        leaves: list[Tensor | None] = [None] * len(values)
        for position in self.leaves():
            values[position] = leaves[position] = values[position].detach().requires_grad_()
        with self.modes.restored(), no_saved_tensor_hooks():  # hooks of the place where it is touched
            output: Tensor = run_program(self.recipe.program, values)
        if not output.requires_grad:
            return output, None
        return output.detach(), _Tape(get_gradient_edge(output), tuple(leaves))

    def current(self) -> list[Any]:
        """The values to run the recipe on; raises if one of them is not what it was in the call."""
        for kept in self._values:
            change = kept.seen.change(kept.tensor, kept.name) if isinstance(kept, _Kept) else None
            if change is not None:
                raise StaleOutput(
                    f"the output {self.recipe.name!r} is computed when it is first used, and its first use is now",
                    found=change,
                    where=str(self.recipe),
                    do="use the output before the optimizer's step (or keep a .clone() of what you need of it), "
                    'or ask for plain outputs: torch.compile(..., options={"outputs": "dense"})',
                )
        return [kept.tensor if isinstance(kept, _Kept) else kept for kept in self._values]
