"""Run a recipe later as it would have run in the call: with the same values and modes, and gradients to the same tensors.

A *recipe* is a recorded program that computes an output (lazy logits) from inputs and other outputs of one call of a compiled
graph. A *use* is a later operator on such an output. If all uses run in the same *chunks* of rows (positions of the sequence),
the large output never exists.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch.autograd.graph import GradientEdge, get_gradient_edge

from streamfx.errors import StaleOutputError
from streamfx.ir.fingerprint import Fingerprint
from streamfx.ir.recipe import Context, Recipe, RecipeProgram, SizeValue
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
    def activate(self) -> Iterator[None]:
        """Context manager: activate these modes (grad, inference, autocast, rounding); restore the current ones at its end."""
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
    """Context manager: set `rounding`, the number of threads and the float32 matmul precision, which change how products round.

    A user may change them between a call and the use of its outputs. The previous ones are restored.
    """

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
        self.extra_traceback = False  # errors keep their message of eager mode

    def run_node(self, n: fx.Node) -> Any:
        """Run a node; an error that it raises also names the line of the user's code that was traced."""
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


MIN_INPUT_RATIO = 32  # a result that is this many times smaller than its inputs is computed in the call: a check reads all inputs


@dataclass
class _SavedInput:
    """An alias of a tensor that a recipe reads, with the same version counter, and its fingerprint at the end of the call.

    The fingerprint detects changes since then: by version counter, shape and memory, and by a checksum if values were read.
    """

    name: str
    tensor: Tensor
    requires_grad: bool
    fingerprint: Fingerprint

    @staticmethod
    def of(name: str, tensor: Tensor, waits: bool) -> _SavedInput:
        """Return an alias of a tensor with its fingerprint.

        If the recipe `waits` (runs at the first use), the fingerprint includes a checksum, to detect hidden writes until then.
        """
        alias = tensor.detach()
        return _SavedInput(name, alias, tensor.requires_grad, Fingerprint.of(alias, reads=waits))

    def change(self, with_counter: bool) -> str | None:
        """Describe how the tensor has changed since the call; None if it has not changed.

        Without `with_counter`, report only changes that the version counter misses.
        """
        visible = self.fingerprint.visible_change(self.tensor, self.name)
        if visible is not None:
            return visible if with_counter or not self.fingerprint.is_written(self.tensor) else None
        return self.fingerprint.hidden_change(self.tensor, self.name)


@dataclass(frozen=True)
class _Tape:
    """One recorded run of a recipe: the autograd edge of its output, and each input's leaf that gets its gradient, or None."""

    output: GradientEdge
    leaves: tuple[Tensor | None, ...]


@dataclass(frozen=True)
class RowChunks:
    """How a use of lazy outputs is chunked: the rows per chunk, and pairs (index of an input, its row dimension)."""

    num_rows: int
    row_dims: tuple[tuple[int, int], ...] = ()


class UseCompiler(Protocol):
    """Compiles graphs that compute results from deferred outputs."""

    def __call__(
        self, graph: fx.GraphModule, inputs: list[Any], weights: list[int], widest: int, row_chunks: RowChunks
    ) -> Callable[..., Any] | None:
        """Return the graph, compiled to loops over the chunks of `row_chunks`.

        `weights` are the indices of inputs without rows, `widest` the number of elements of the largest value in the graph. None
        if its chunks would differ, or if a value outside loops, other than a result, has `widest / 2` elements or more.
        """

    def rows_per_chunk(self, numel: int, length: int) -> int:
        """Return the number of rows per chunk for a deferred output of `numel` elements and `length` rows."""


class RowComputer(Protocol):
    """Computes rows of a source in the chunks that all passes over it share."""

    def can_chunk(self, source: RecomputeSource) -> bool:
        """Return whether the source can be computed in chunks."""

    def rows(self, source: RecomputeSource, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) of the source's output, along its longest dimension of rows."""


@dataclass
class ChunkingDecision:
    """Whether the deferred outputs of one call are computed in the same chunks, or each at once. The first use decides for all.

    All are computed alike because the caller may compare their values, and a product of another number of rows rounds
    differently. `in_chunks` is None while undecided. `sources` are the deferred outputs.
    """

    compiler: UseCompiler | None = None
    row_computer: RowComputer | None = None
    in_chunks: bool | None = None
    sources: weakref.WeakSet[RecomputeSource] = field(default_factory=weakref.WeakSet)
    _lock: Any = field(default_factory=threading.Lock)

    def try_keep_chunkable(self) -> bool:
        """Return whether the deferred outputs of the call may still be computed in chunks.

        If this is undecided, and one of them cannot be, decide that each is computed at once, and return False.
        """
        if self.in_chunks is None:
            row_computer = self.row_computer
            if row_computer is None or not all(row_computer.can_chunk(source) for source in self.sources):
                self.decide(in_chunks=False)
        return self.in_chunks is not False

    def decide(self, in_chunks: bool) -> bool:
        """Decide whether all deferred outputs of the call are computed in chunks, unless this is decided; return the decision."""
        with self._lock:
            self.in_chunks = in_chunks if self.in_chunks is None else self.in_chunks
            return self.in_chunks


def with_distinct_memory(gradients: Iterable[Tensor | None], kept: Tensor) -> list[Tensor | None]:
    """Return the gradients, cloned where necessary: no two share memory, and none shares it with `kept`, except `kept` itself.

    The reason: autograd may accumulate into gradients in place.
    """
    addresses, results = {_storage_address(kept)}, list[Tensor | None]()
    for gradient in gradients:
        address = None if gradient is kept else _storage_address(gradient)
        is_shared = gradient is not None and address is not None and address in addresses
        results.append(gradient.clone() if is_shared else gradient)  # type: ignore[union-attr]
        addresses.add(address)
    return results


def _storage_address(value: Tensor | None) -> int | None:
    """Return the address of a tensor's storage; None unless it is a plain strided tensor."""
    return value.untyped_storage().data_ptr() if type(value) is Tensor and value.layout is torch.strided else None


class RecomputeSource:
    """The values that a recipe reads, from which a deferred tensor of `numel` elements is recomputed.

    If it `waits`, the deferred tensor is computed on first use; otherwise it is computed in the call.
    """

    def __init__(self, recipe: Recipe, values: Sequence[Any], numel: int, chunking: ChunkingDecision) -> None:
        """Keep the values of the recipe's inputs, in order, with fingerprints of tensors, and the current modes.

        `numel` is the number of elements of its output. `chunking` is shared by the deferred outputs of one call.
        """
        self.recipe, self.numel, self.chunking = recipe, numel, chunking
        self.modes = Modes.now(recipe.device)
        self.waits = MIN_INPUT_RATIO * numel >= max((value.numel() for value in values if isinstance(value, Tensor)), default=0)
        self._values: list[Any] = [
            value if isinstance(item, SizeValue) else _SavedInput.of(item.name, value, self.waits)
            for item, value in zip(recipe.program.inputs, values, strict=True)
        ]
        self._tapes: list[_Tape] = []  # at most one; the thread that uses it removes it
        chunking.sources.add(self)

    @property
    def differentiable(self) -> bool:
        """Whether the output requires a gradient."""
        return self.recipe.requires_grad and self.modes.grad

    @property
    def is_computed(self) -> bool:
        """Whether the dense tensor was computed, and the values that its gradient needs are kept."""
        return bool(self._tapes)

    def leaves(self) -> list[int]:
        """Return the indices of the recipe's inputs that need gradients."""
        if not self.differentiable:
            return []
        return [i for i, value in enumerate(self._values) if isinstance(value, _SavedInput) and value.requires_grad]

    def recompute(self) -> Tensor:
        """Return the dense output, detached.

        If the outputs of the call are not computed in chunks, run the recipe with autograd, and keep this run for `gradients`.
        """
        if self.chunking.decide(in_chunks=False):
            assert self.chunking.row_computer is not None
            return self.chunking.row_computer.rows(self, 0, self.length)
        output, tape = self._run_and_record()
        self._tapes[:] = [] if tape is None else [tape]
        return output

    @property
    def longest(self) -> tuple[int, int]:
        """The longest dimension of rows: its index in the deferred tensor, and in the input that supplies the rows."""
        rows = self.recipe.rows
        assert rows is not None
        shape = self._values[rows.source].tensor.shape
        return max(
            ((dim, input_dim) for dim, input_dim in enumerate(rows.dims) if input_dim is not None),
            key=lambda dims: shape[dims[1]],
        )

    @property
    def length(self) -> int:
        """The number of rows in the longest dimension of rows."""
        assert self.recipe.rows is not None
        length: int = self._values[self.recipe.rows.source].tensor.shape[self.longest[1]]
        return length

    def has_rows(self, dim: int) -> bool:
        """Return whether rows along a dimension can be computed separately, with the same values as in the full tensor."""
        return self.recipe.rows is not None and self.recipe.rows.dims[dim] is not None and self.chunking.try_keep_chunkable()

    def recompute_rows(self, ranges: Mapping[int, range]) -> Tensor:
        """Return the output restricted to index ranges (dimension -> indices), detached.

        Only rows from the first selected one to the last, along the longest dimension of rows, are computed.
        """
        assert self.chunking.row_computer is not None
        longest = self.longest[0]
        selected = ranges.get(longest, range(self.length))
        rows = self.chunking.row_computer.rows(self, selected.start, selected[-1] + 1)
        range_of = {**ranges, longest: range(0, selected[-1] + 1 - selected.start, selected.step)}  # within `rows`
        index = tuple(
            slice(range_of[dim].start, range_of[dim].stop, range_of[dim].step) if dim in range_of else slice(None)
            for dim in range(rows.dim())
        )
        return rows[index].clone(memory_format=torch.contiguous_format)

    def gradients(self, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of each of the recipe's inputs (None if it needs none), given the gradient of its output.

        It uses up the recorded run of `recompute`, if there is one; otherwise the recipe runs again. Raise `StaleOutputError` if
        an input has changed since the call.
        """
        try:
            tape: _Tape | None = self._tapes.pop()
        except IndexError:
            tape = self._run_and_record()[1]
        else:
            self.checked_values(with_counter=False)  # autograd checks version counters itself
        if tape is None:
            return (None,) * len(self._values)
        reached = [leaf for leaf in tape.leaves if leaf is not None]
        gradients = iter(torch.autograd.grad([tape.output], reached, [gradient], allow_unused=True))
        return tuple(None if leaf is None else next(gradients) for leaf in tape.leaves)

    def _run_and_record(self) -> tuple[Tensor, _Tape | None]:
        """Run the recipe and return its detached output, with the tape for its gradients (None if it requires none)."""
        values = self.checked_values()
        leaves: list[Tensor | None] = [None] * len(values)
        for index in self.leaves():
            values[index] = leaves[index] = values[index].detach().requires_grad_()
        with self.modes.activate(), no_saved_tensor_hooks():  # hooks active at the place of use must not apply
            output: Tensor = run_program(self.recipe.program, values)
        if not output.requires_grad:
            return output, None
        return output.detach(), _Tape(get_gradient_edge(output), tuple(leaves))

    def checked_values(self, with_counter: bool = True) -> list[Any]:
        """Return the values of the recipe's inputs; raise `StaleOutputError` if a tensor has changed since the call.

        Without `with_counter`, only changes that the version counter misses count.
        """
        for value in self._values:
            change = value.change(with_counter) if isinstance(value, _SavedInput) else None
            if change is not None:
                raise StaleOutputError(
                    f"the lazy output {self.recipe.name!r} is computed when it is first used, which is now",
                    found=change,
                    where=str(self.recipe),
                    do="use the output before the optimizer's step (or keep a .clone() of the part that you need), "
                    'or use dense outputs: torch.compile(..., options={"outputs": "dense"})',
                )
        return self.unchecked_values()

    def unchecked_values(self) -> list[Any]:
        """Return the values of the recipe's inputs (tensors, numbers, sizes), without checks."""
        return [value.tensor if isinstance(value, _SavedInput) else value for value in self._values]
