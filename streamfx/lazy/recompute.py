"""Runs a recipe later as it would have run in the call: same values, same modes, gradients to the same places."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch.autograd.graph import GradientEdge, get_gradient_edge

from streamfx.errors import StaleOutputError
from streamfx.ir.fingerprint import Fingerprint
from streamfx.ir.recipe import Context, GivenSize, Recipe, RecipeProgram
from streamfx.runtime.error_location import name_line
from streamfx.torch_private import no_saved_tensor_hooks


@dataclass(frozen=True)
class Modes:
    """The modes of a call that decide what a torch function does."""

    grad: bool
    inference: bool
    autocasts: tuple[tuple[str, torch.dtype, bool], ...]  # device type, type, whether it is on
    rounding: tuple[int, str]  # number of threads, precision of products in float32

    @staticmethod
    def now(device: torch.device) -> Modes:
        types = [name for name in dict.fromkeys(("cpu", device.type)) if torch.amp.is_autocast_available(name)]
        autocasts = ((name, torch.get_autocast_dtype(name), torch.is_autocast_enabled(name)) for name in types)
        rounding = (torch.get_num_threads(), torch.get_float32_matmul_precision())
        return Modes(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), tuple(autocasts), rounding)

    @contextmanager
    def restored(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self.inference != torch.is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for name, dtype, enabled in self.autocasts:
                if enabled or torch.is_autocast_enabled(name):
                    stack.enter_context(torch.autocast(name, dtype=dtype, enabled=enabled, cache_enabled=False))
            stack.enter_context(_rounding(self.rounding))
            yield


@contextmanager
def _rounding(wanted: tuple[int, str]) -> Iterator[None]:
    """What changes how products round, and can be changed between a call and the use of its outputs."""

    def set_to(threads: int, precision: str) -> None:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if torch.get_float32_matmul_precision() != precision:
            torch.set_float32_matmul_precision(precision)

    before = (torch.get_num_threads(), torch.get_float32_matmul_precision())
    set_to(*wanted)
    try:
        yield
    finally:
        set_to(*before)


class _Runner(fx.Interpreter):
    """Runs a program, each operator under the modes that the graph had set for it."""

    def __init__(self, program: RecipeProgram) -> None:
        super().__init__(torch.nn.Module(), graph=program.graph)
        self.contexts: Mapping[fx.Node, Context] = program.contexts
        self.extra_traceback = False  # an error says what it says in eager

    def run_node(self, n: fx.Node) -> Any:
        try:
            return self._run_under_modes(n)
        except Exception as error:
            name_line(error, [n])
            raise

    def _run_under_modes(self, n: fx.Node) -> Any:
        context = self.contexts.get(n)
        if context is None:
            return super().run_node(n)
        with ExitStack() as stack:
            for arguments in context.autocasts:
                stack.enter_context(torch.autocast(*arguments))
            if context.grad is not None:
                stack.enter_context(torch.set_grad_enabled(context.grad))
            return super().run_node(n)


def run_program(program: RecipeProgram, values: Sequence[Any]) -> Any:
    return _Runner(program).run(*values)


SMALL = 32  # times smaller than what it is made from: made at once, rather than to read a weight twice for the check


@dataclass
class _HeldOutput:
    """A tensor that a recipe reads, and what it held when the call ended. `tensor` has the same memory and version."""

    name: str
    tensor: Tensor
    requires_grad: bool
    seen: Fingerprint

    @staticmethod
    def of(name: str, tensor: Tensor, waits: bool) -> _HeldOutput:
        alias = tensor.detach()
        return _HeldOutput(name, alias, tensor.requires_grad, Fingerprint.of(alias, reads=waits))

    def change(self, with_counter: bool) -> str | None:
        """What has happened to it since; without its version counter, what that does not show."""
        seen = self.seen.visible_change(self.tensor, self.name)
        if seen is not None:
            return seen if with_counter or not self.seen.is_written(self.tensor) else None
        return self.seen.hidden_change(self.tensor, self.name)


@dataclass(frozen=True)
class _Tape:
    """One run with gradients: where they come in, and the leaves that they reach."""

    output: GradientEdge
    leaves: tuple[Tensor | None, ...]


@dataclass(frozen=True)
class RowCut:
    """How loops are to cut what they make: into so many rows of one axis, a dimension of the inputs at some positions."""

    rows: int
    along: tuple[tuple[int, int], ...] = ()


class UseCompiler(Protocol):
    """Compiles graphs of what is asked for of deferred outputs."""

    def __call__(
        self, graph: fx.GraphModule, inputs: list[Any], weights: list[int], most: int, cut: RowCut
    ) -> Callable[..., Any] | None:
        """The graph as loops; None where it makes something of half of `most` elements that is no result, or cuts otherwise."""

    def rows_per_chunk(self, numel: int, length: int) -> int:
        """For values of `numel` elements that have `length` rows."""


class RowMaker(Protocol):
    """Makes rows of a source in the chunks that all passes over it have."""

    def can_cut(self, source: RecomputeSource) -> bool: ...

    def rows(self, source: RecomputeSource, start: int, stop: int) -> Tensor: ...


@dataclass
class Agreement:
    """How the outputs of one call are made: all in the same chunks, or all as a whole. The first look at one of them decides.

    What was read of one may be compared with the next, and a product rounds in another way where it has another number of rows.
    """

    compiler: UseCompiler | None = None
    maker: RowMaker | None = None
    in_chunks: bool | None = None
    sources: weakref.WeakSet[RecomputeSource] = field(default_factory=weakref.WeakSet)
    _lock: Any = field(default_factory=threading.Lock)

    def may_cut(self) -> bool:
        """Whether all that is there of the call's outputs can be made in chunks, and was not made otherwise before."""
        if self.in_chunks is None:
            maker = self.maker
            if maker is None or not all(maker.can_cut(source) for source in self.sources):
                self.settled(in_chunks=False)
        return self.in_chunks is not False

    def settled(self, in_chunks: bool) -> bool:
        """How the outputs are made; as given, if that was open until now."""
        with self._lock:
            self.in_chunks = in_chunks if self.in_chunks is None else self.in_chunks
            return self.in_chunks


class RecomputeSource:
    """What one deferred tensor, of `numel` elements, is rebuilt from. Holds only the tensors that the recipe reads.

    A tensor that `waits` is made when it is touched; others are made in the call.
    """

    def __init__(self, recipe: Recipe, values: Sequence[Any], numel: int, agreement: Agreement) -> None:
        self.recipe, self.numel, self.agreement = recipe, numel, agreement
        self.modes = Modes.now(recipe.device)
        self.waits = SMALL * numel >= max((value.numel() for value in values if isinstance(value, Tensor)), default=0)
        self._values: list[Any] = [
            value if isinstance(given, GivenSize) else _HeldOutput.of(given.name, value, self.waits)
            for given, value in zip(recipe.program.given, values, strict=True)
        ]
        self._tapes: list[_Tape] = []  # at most one; taken out by whoever runs it: several threads may ask
        agreement.sources.add(self)

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
        return [i for i, value in kept if self.differentiable and isinstance(value, _HeldOutput) and value.requires_grad]

    def rebuild(self) -> Tensor:
        """The dense tensor, outside of autograd. Made in one piece, what its gradient needs is kept beside it."""
        if self.agreement.settled(in_chunks=False):
            assert self.agreement.maker is not None
            return self.agreement.maker.rows(self, 0, self.length)
        output, tape = self._recorded()
        self._tapes[:] = [] if tape is None else [tape]
        return output

    @property
    def longest(self) -> tuple[int, int]:
        """The longest dimension of rows: which it is of the tensor, and of the given value that the rows are made of."""
        rows = self.recipe.rows
        assert rows is not None
        shape = self._values[rows.given].tensor.shape
        return max(((dim, place) for dim, place in enumerate(rows.dims) if place is not None), key=lambda item: shape[item[1]])

    @property
    def length(self) -> int:
        """How many rows there are in the longest dimension of rows."""
        assert self.recipe.rows is not None
        length: int = self._values[self.recipe.rows.given].tensor.shape[self.longest[1]]
        return length

    def has_rows(self, dim: int) -> bool:
        """Whether rows along a dimension can be made by themselves, with the values that they have in the whole."""
        return self.recipe.rows is not None and self.recipe.rows.dims[dim] is not None and self.agreement.may_cut()

    def rebuild_rows(self, ranges: Mapping[int, range]) -> Tensor:
        """The dense tensor restricted to ranges of some of its rows, outside of autograd."""
        assert self.agreement.maker is not None
        longest = self.longest[0]
        own = ranges.get(longest, range(self.length))
        made = self.agreement.maker.rows(self, own.start, own[-1] + 1)
        within = {**ranges, longest: range(0, own[-1] + 1 - own.start, own.step)}
        index = tuple(
            slice(within[dim].start, within[dim].stop, within[dim].step) if dim in within else slice(None)
            for dim in range(made.dim())
        )
        return made[index].clone(memory_format=torch.contiguous_format)

    def gradients(self, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of what the recipe reads, one for each given value. Runs the recipe again where it has to."""
        try:
            tape: _Tape | None = self._tapes.pop()
        except IndexError:
            tape = self._recorded()[1]
        else:
            self.current(with_counter=False)  # what a counter shows, autograd knows
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

    def current(self, with_counter: bool = True) -> list[Any]:
        """The values to run the recipe on; raises if one of them is not what it was in the call."""
        for kept in self._values:
            change = kept.change(with_counter) if isinstance(kept, _HeldOutput) else None
            if change is not None:
                raise StaleOutputError(
                    f"the output {self.recipe.name!r} is computed when it is first used, and its first use is now",
                    found=change,
                    where=str(self.recipe),
                    do="use the output before the optimizer's step (or keep a .clone() of what you need of it), "
                    'or ask for plain outputs: torch.compile(..., options={"outputs": "dense"})',
                )
        return self.unchecked()

    def unchecked(self) -> list[Any]:
        """The same, whatever has become of them."""
        return [kept.tensor if isinstance(kept, _HeldOutput) else kept for kept in self._values]
