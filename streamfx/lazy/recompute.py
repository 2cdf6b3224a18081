"""Run a recipe later as it would have run in the call: with the same values and modes, and gradients to the same tensors."""

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
    """The modes of a call that influence the result of a torch function."""

    grad: bool
    inference: bool
    autocasts: tuple[tuple[str, torch.dtype, bool], ...]  # device type, dtype, enabled
    rounding: tuple[int, str]  # number of threads, precision of float32 products

    @staticmethod
    def now(device: torch.device) -> Modes:
        """Return the modes that are active now, for tensors on `device`."""
        types = [name for name in dict.fromkeys(("cpu", device.type)) if torch.amp.is_autocast_available(name)]
        autocasts = ((name, torch.get_autocast_dtype(name), torch.is_autocast_enabled(name)) for name in types)
        rounding = (torch.get_num_threads(), torch.get_float32_matmul_precision())
        return Modes(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), tuple(autocasts), rounding)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Enter these modes for a `with` block."""
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
def _rounding(rounding: tuple[int, str]) -> Iterator[None]:
    """Set the modes that change how products round, because a user may change them between a call and the use of its outputs."""

    def set_to(threads: int, precision: str) -> None:
        """Set the number of threads and the matmul precision, if they differ."""
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if torch.get_float32_matmul_precision() != precision:
            torch.set_float32_matmul_precision(precision)

    previous = (torch.get_num_threads(), torch.get_float32_matmul_precision())
    set_to(*rounding)
    try:
        yield
    finally:
        set_to(*previous)


class _Runner(fx.Interpreter):
    """Interprets a program and runs each operator under the modes that the graph set for it."""

    def __init__(self, program: RecipeProgram) -> None:
        super().__init__(torch.nn.Module(), graph=program.graph)
        self.contexts: Mapping[fx.Node, Context] = program.contexts
        self.extra_traceback = False  # errors keep the message they have in eager

    def run_node(self, n: fx.Node) -> Any:
        """Run a node; an error names the user's line that it comes from."""
        try:
            return self._run_under_modes(n)
        except Exception as error:
            name_line(error, [n])
            raise

    def _run_under_modes(self, n: fx.Node) -> Any:
        """Run a node under the autocasts and the grad mode that the graph set for it."""
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
    """Run a recipe's graph on the values of its inputs."""
    return _Runner(program).run(*values)


SMALL = 32  # times smaller than its inputs: computed in the call, because a later check would read the weights once more


@dataclass
class _HeldOutput:
    """A tensor that a recipe reads, and its fingerprint at the end of the call. `tensor` shares memory and version counter."""

    name: str
    tensor: Tensor
    requires_grad: bool
    fingerprint: Fingerprint

    @staticmethod
    def of(name: str, tensor: Tensor, waits: bool) -> _HeldOutput:
        """Return an alias of a tensor with its fingerprint; `waits`: it will be read later, so hidden writes matter."""
        alias = tensor.detach()
        return _HeldOutput(name, alias, tensor.requires_grad, Fingerprint.of(alias, reads=waits))

    def change(self, with_counter: bool) -> str | None:
        """Describe how the tensor has changed since the call; without `with_counter`, only changes that the counter misses."""
        visible = self.fingerprint.visible_change(self.tensor, self.name)
        if visible is not None:
            return visible if with_counter or not self.fingerprint.is_written(self.tensor) else None
        return self.fingerprint.hidden_change(self.tensor, self.name)


@dataclass(frozen=True)
class _Tape:
    """One run with gradients: the edge where they enter, and the leaves that they reach."""

    output: GradientEdge
    leaves: tuple[Tensor | None, ...]


@dataclass(frozen=True)
class RowCut:
    """The chunks of a use: so many rows of one axis, which is a dimension of the inputs at some positions."""

    rows: int
    along: tuple[tuple[int, int], ...] = ()


class UseCompiler(Protocol):
    """Compiles graphs that compute results from deferred outputs."""

    def __call__(
        self, graph: fx.GraphModule, inputs: list[Any], weights: list[int], widest: int, cut: RowCut
    ) -> Callable[..., Any] | None:
        """Return the graph as loops; None if a value other than a result has `most / 2` elements, or if the cut differs."""

    def rows_per_chunk(self, numel: int, length: int) -> int:
        """Return the number of rows per chunk for values of `numel` elements and `length` rows."""


class RowMaker(Protocol):
    """Computes rows of a source in the chunks that all passes over it share."""

    def can_cut(self, source: RecomputeSource) -> bool: ...

    def rows(self, source: RecomputeSource, start: int, stop: int) -> Tensor: ...


@dataclass
class Agreement:
    """How the outputs of one call are computed: all in the same chunks, or all at once. The first use of any of them decides.

    The caller may compare values of one output with those of another, and a product of a different number of rows rounds
    differently.
    """

    compiler: UseCompiler | None = None
    maker: RowMaker | None = None
    in_chunks: bool | None = None
    sources: weakref.WeakSet[RecomputeSource] = field(default_factory=weakref.WeakSet)
    _lock: Any = field(default_factory=threading.Lock)

    def may_cut(self) -> bool:
        """Return whether the call's live outputs can all be computed in chunks; if not, fix that none is."""
        if self.in_chunks is None:
            maker = self.maker
            if maker is None or not all(maker.can_cut(source) for source in self.sources):
                self.settled(in_chunks=False)
        return self.in_chunks is not False

    def settled(self, in_chunks: bool) -> bool:
        """Fix how all outputs of the call are computed, unless it is fixed already; return whether that is in chunks."""
        with self._lock:
            self.in_chunks = in_chunks if self.in_chunks is None else self.in_chunks
            return self.in_chunks


class RecomputeSource:
    """The tensors that one deferred tensor of `numel` elements is recomputed from; it holds only those that the recipe reads.

    If it `waits`, the deferred tensor is computed on first use; otherwise it is computed in the call.
    """

    def __init__(self, recipe: Recipe, values: Sequence[Any], numel: int, agreement: Agreement) -> None:
        """Hold the values that the recipe reads, with fingerprints of the tensors, and join the outputs of the same call."""
        self.recipe, self.numel, self.agreement = recipe, numel, agreement
        self.modes = Modes.now(recipe.device)
        self.waits = SMALL * numel >= max((value.numel() for value in values if isinstance(value, Tensor)), default=0)
        self._values: list[Any] = [
            value if isinstance(given, GivenSize) else _HeldOutput.of(given.name, value, self.waits)
            for given, value in zip(recipe.program.given, values, strict=True)
        ]
        self._tapes: list[_Tape] = []  # at most one; the thread that uses it removes it
        agreement.sources.add(self)

    @property
    def differentiable(self) -> bool:
        return self.recipe.requires_grad and self.modes.grad

    @property
    def is_rebuilt(self) -> bool:
        """Whether the dense tensor was computed, and the values that its gradient needs are kept."""
        return bool(self._tapes)

    def leaves(self) -> list[int]:
        """Return the indices of the given values that need gradients."""
        numbered_values = enumerate(self._values)
        return [
            i for i, value in numbered_values if self.differentiable and isinstance(value, _HeldOutput) and value.requires_grad
        ]

    def rebuild(self) -> Tensor:
        """Return the dense tensor, detached. If it is computed at once, keep the values that its gradient needs."""
        if self.agreement.settled(in_chunks=False):
            assert self.agreement.maker is not None
            return self.agreement.maker.rows(self, 0, self.length)
        output, tape = self._run_and_record()
        self._tapes[:] = [] if tape is None else [tape]
        return output

    @property
    def longest(self) -> tuple[int, int]:
        """The longest dimension of rows: its index in the deferred tensor, and in the given value that supplies the rows."""
        rows = self.recipe.rows
        assert rows is not None
        shape = self._values[rows.given].tensor.shape
        return max(
            ((dim, given_dim) for dim, given_dim in enumerate(rows.dims) if given_dim is not None),
            key=lambda item: shape[item[1]],
        )

    @property
    def length(self) -> int:
        """The number of rows in the longest dimension of rows."""
        assert self.recipe.rows is not None
        length: int = self._values[self.recipe.rows.given].tensor.shape[self.longest[1]]
        return length

    def has_rows(self, dim: int) -> bool:
        """Return whether rows along a dimension can be computed separately, with the same values as in the full tensor."""
        return self.recipe.rows is not None and self.recipe.rows.dims[dim] is not None and self.agreement.may_cut()

    def rebuild_rows(self, ranges: Mapping[int, range]) -> Tensor:
        """Return the dense tensor restricted to ranges of some of its dimensions, detached."""
        assert self.agreement.maker is not None
        longest = self.longest[0]
        selected = ranges.get(longest, range(self.length))
        rows = self.agreement.maker.rows(self, selected.start, selected[-1] + 1)
        in_rows = {**ranges, longest: range(0, selected[-1] + 1 - selected.start, selected.step)}
        index = tuple(
            slice(in_rows[dim].start, in_rows[dim].stop, in_rows[dim].step) if dim in in_rows else slice(None)
            for dim in range(rows.dim())
        )
        return rows[index].clone(memory_format=torch.contiguous_format)

    def gradients(self, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the recipe's inputs, one for each given value; recompute the recipe if necessary."""
        try:
            tape: _Tape | None = self._tapes.pop()
        except IndexError:
            tape = self._run_and_record()[1]
        else:
            self.current(with_counter=False)  # autograd checks version counters itself
        if tape is None:
            return (None,) * len(self._values)
        reached = [leaf for leaf in tape.leaves if leaf is not None]
        gradients = iter(torch.autograd.grad([tape.output], reached, [gradient], allow_unused=True))
        return tuple(None if leaf is None else next(gradients) for leaf in tape.leaves)

    def _run_and_record(self) -> tuple[Tensor, _Tape | None]:
        """Run the recipe and return its detached output, with the tape for its gradients (None if it requires none)."""
        values = self.current()
        leaves: list[Tensor | None] = [None] * len(values)
        for index in self.leaves():
            values[index] = leaves[index] = values[index].detach().requires_grad_()
        with self.modes.restored(), no_saved_tensor_hooks():  # hooks active at the place of use must not apply
            output: Tensor = run_program(self.recipe.program, values)
        if not output.requires_grad:
            return output, None
        return output.detach(), _Tape(get_gradient_edge(output), tuple(leaves))

    def current(self, with_counter: bool = True) -> list[Any]:
        """Return the values to run the recipe on; raise an error if one of them has changed since the call."""
        for held in self._values:
            change = held.change(with_counter) if isinstance(held, _HeldOutput) else None
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
        """Return the values to run the recipe on, without checks."""
        return [held.tensor if isinstance(held, _HeldOutput) else held for held in self._values]
