"""Compute small functions of large deferred values in chunks of the sequence, so that the large values never exist.

The results that a loss on deferred logits needs (one number, or one per token), and the gradients of the logits' inputs, are
functions of the recipe's inputs and a few small tensors. They are written as a graph, which the same compiler turns into loops
over chunks, once for all lengths. If the graph does not stream, the large values are materialized, as in eager.

    hidden, weight | linear -> float -> log_softmax -> gather(ids) | log-probabilities [b t]
    hidden, weight | linear -> ... -> _log_softmax_backward_data -> autograd.grad(linear) | gradients of hidden and weight

A *cell* (`lazy_values.py`) is a deferred tensor's value, or how to compute it: a *source* (a *recipe*, which is a recorded
program, and the tensors that it reads), or a *step* (an operator on other cells). *Rows* are positions along a dimension of the
sequence.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from streamfx.errors import StreamFXError
from streamfx.ir.structural_hash import structure
from streamfx.lazy import steps
from streamfx.lazy.lazy_values import Cell, DeferredOperator
from streamfx.lazy.recompute import Modes, RecomputeSource, RowChunks
from streamfx.lazy.steps import compacted
from streamfx.log import log
from streamfx.runtime.outer import COPYING_VIEWS
from streamfx.runtime.shape_families import (
    Family,
    FamilyCode,
    Numbers,
    any_size,
    find_code,
    graph_for,
    layout_of,
    shapes_for,
    widened_family,
)
from streamfx.torch_private import ENTER_AUTOCAST, EXIT_AUTOCAST, SET_GRAD, no_modes
from streamfx.torch_private.dynamo import compiling
from streamfx.torch_private.symbolic_sizes import with_sizes

aten = torch.ops.aten
MAX_GRAPHS = 64  # compiled per process; a program that needs more has constants in its graphs that never repeat
MAX_VERSIONS = 6  # code variants per graph, for sizes that cannot share one


def compute_in_chunks(cells: Sequence[Cell]) -> Sequence[Tensor] | None:
    """Return the values of small cells, computed in chunks, so that their large operands never exist.

    None if the graph that computes them cannot run in chunks.
    """
    builder = _GraphBuilder()
    results = [builder.node(cell) for cell in cells]
    return _run(builder, results) if builder.try_keep_chunkable() else None


def compute_gradients_in_chunks(source: RecomputeSource, gradient: Cell) -> Sequence[Tensor | None] | None:
    """Return the gradient (or None) of each input of a source, computed in chunks, so that the large `gradient` never exists.

    `gradient` is the cell of the gradient of the source's output. None instead of the list if the graph cannot run in chunks.
    """
    builder = _GraphBuilder()
    output_gradient = builder.node(gradient)
    output, leaves = builder.recipe_output(source)
    input_indices = [i for i, leaf in enumerate(leaves) if leaf is not None]
    gradients = builder.call(
        torch.autograd.grad, (output,), [leaves[i] for i in input_indices], (output_gradient,), allow_unused=True
    )
    results = [builder.call(operator.getitem, gradients, result_index) for result_index in range(len(input_indices))]
    computed = _run(builder, results) if builder.try_keep_chunkable() else None
    if computed is None:
        return None
    gradient_of_input = dict(zip(input_indices, computed, strict=True))
    return [gradient_of_input.get(i) for i in range(len(leaves))]


class RowsInChunks:
    """Computes rows of a source in the chunks that all uses share: by the same operators, on the same numbers of rows."""

    def can_chunk(self, source: RecomputeSource) -> bool:
        """Return whether the source's output is large, and a graph of its recipe alone compiles to loops over chunks."""
        if source.numel < steps.MIN_NUMEL or source.recipe.rows is None or source.chunking.compiler is None:
            return False
        builder = _GraphBuilder(checks=False)
        return _code_for(builder, [builder.output_of(source)]) is not None

    def rows(self, source: RecomputeSource, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) of a source's output, along its longest dimension of rows.

        The chunks that contain them are computed; if these alone do not run in chunks, all rows are.
        """
        rows_per_chunk = rows_per_chunk_of(source)
        row_dim, _ = source.longest
        first_row = max(0, min(start, stop - 2)) // rows_per_chunk * rows_per_chunk  # a single row is not a sequence
        end_row = min(source.length, -(-stop // rows_per_chunk) * rows_per_chunk)
        for bounds in ((first_row, end_row), (0, source.length)):
            builder = _GraphBuilder()
            results = _run(builder, [builder.output_of(source, *bounds)])
            if results is not None:
                rows: Tensor = results[0].narrow(row_dim, start - bounds[0], stop - start)
                return rows
        raise AssertionError("what streams once streams again")


def rows_per_chunk_of(source: RecomputeSource) -> int:
    """Return the rows per chunk, the same in every use of the source; all its rows if there is no compiler."""
    compiler = source.chunking.compiler
    return compiler.rows_per_chunk(source.numel, source.length) if compiler is not None else source.length


class _GraphBuilder:
    """Builds a graph that computes cells; its inputs are the inputs of their sources, small tensors, and sizes."""

    def __init__(self, checks: bool = True) -> None:
        """Start an empty graph; with `checks`, an input that has changed since the call raises an error."""
        self.checks = checks
        self.graph = fx.Graph()
        self.inputs: list[Any] = []  # the values of the graph's placeholders
        self.shared: set[int] = set()  # indices of inputs without rows: weights
        self.widest = 0  # number of elements of the largest value
        self._cells: dict[Cell, fx.Node] = {}
        self._steps: dict[DeferredOperator, fx.Node] = {}
        self.sources: dict[RecomputeSource, tuple[fx.Node, list[fx.Node | None]]] = {}  # output, and the leaf of each input
        self.row_dims: list[tuple[int, int]] = []  # index of each input with rows, and its row dimension
        self._last: fx.Node | None = None  # the last placeholder

    def call(self, function: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a call of a function to the graph, and return its node."""
        return self.graph.call_function(function, args, kwargs)

    def add_input(self, value: Any, is_shared: bool = False) -> fx.Node:
        """Add a placeholder for `value`, a tensor or a size, after the others, and return it.

        `is_shared`: a tensor without rows (a weight), which all chunks read.
        """
        if is_shared:
            self.shared.add(len(self.inputs))
        self.inputs.append(value)
        name = f"given_{len(self.inputs)}"
        if self._last is None:
            self._last = self.graph.placeholder(name)
        else:
            with self.graph.inserting_after(self._last):
                self._last = self.graph.placeholder(name)
        return self._last

    def tensor(self, value: Tensor) -> fx.Node:
        """Add a small tensor as an input, and return its node.

        Expanded dimensions (stride 0) have size 1 in the input, and the graph expands them, which needs no memory.
        """
        compact = compacted(value)
        node = self.add_input(compact)
        if compact is value:
            return node
        sizes = [self.size(full) if full != size else full for full, size in zip(value.shape, compact.shape, strict=True)]
        return self.call(aten.expand.default, node, sizes)

    def size(self, size: int) -> Any:
        """Return an operand for a size: a new input, so that calls with other lengths share the graph.

        0, 1, negative sizes, and huge ones (a slice to the end) have a meaning of their own, and stay constants.
        """
        return self.add_input(size) if 2 <= size < 1 << 31 else size

    def node(self, cell: Cell) -> fx.Node:
        """Return the node that computes a cell; its operators are added at its first use."""
        if cell not in self._cells:
            self._cells[cell] = self._cell_node(cell)
        return self._cells[cell]

    def _cell_node(self, cell: Cell) -> fx.Node:
        """Add the operators that compute a cell, and return its node; update `widest`, the elements of the largest value."""
        step, value = cell.step, cell.value  # in this order: see NOTE [Cells that several threads read]
        if value is not None:
            return self.tensor(value)
        self.widest = max(self.widest, cell.numel)
        if cell.source is not None:
            return self.output_of(cell.source)
        assert step is not None
        if step not in self._steps:
            self._steps[step] = self._step_node(step)
        node = self._steps[step]
        return node if cell.result is None else self.call(operator.getitem, node, cell.result)

    def _step_node(self, step: DeferredOperator) -> fx.Node:
        """Add a deferred operator and the cells that it reads, and return its node; its integer sizes become inputs."""
        sizes = _sizes_of(step.func)
        names = [argument.name for argument in step.func._schema.arguments]

        def converted(name: str, item: Any) -> Any:
            """Return an argument as an operand of the graph; integer sizes become inputs."""
            if isinstance(item, Cell):
                return self.node(item)
            if isinstance(item, Tensor):
                return self.tensor(item)
            return self.size(item) if name in sizes and type(item) is int else item

        args = [
            pytree.tree_map(lambda item, name=name: converted(name, item), value)
            for name, value in zip(names, step.args, strict=False)
        ]
        kwargs = {
            name: pytree.tree_map(lambda item, name=name: converted(name, item), value) for name, value in step.kwargs.items()
        }
        return self.call(COPYING_VIEWS.get(step.func, step.func), *args, **kwargs)

    def output_of(self, source: RecomputeSource, start: int = 0, stop: int | None = None) -> fx.Node:
        """Add a source's recipe, on rows [start, stop) of its input with rows (None: to the end); return its detached output."""
        self.widest = max(self.widest, source.numel)
        return self.call(aten.detach.default, self.recipe_output(source, start, stop)[0])

    def recipe_output(
        self, source: RecomputeSource, start: int = 0, stop: int | None = None
    ) -> tuple[fx.Node, list[fx.Node | None]]:
        """Add a source's recipe; return its output, and for each input the leaf that gets its gradient (None if it needs none).

        The graph records the recipe with autograd even if no gradient is taken, so that the same operators run in both cases. A
        source that was added before is not added twice.
        """
        if source not in self.sources:
            self.sources[source] = self._record_recipe(source, start, stop)
        return self.sources[source]

    def try_keep_chunkable(self) -> bool:
        """Return whether all sources have the same number of rows per chunk, and may be computed in chunks.

        The outputs of one call are all computed in chunks, or all at once. If one cannot be computed in chunks, this decides it.
        """
        return (
            all(source.chunking.try_keep_chunkable() for source in self.sources)
            and len({*map(rows_per_chunk_of, self.sources)}) == 1
        )

    def _record_recipe(self, source: RecomputeSource, start: int, stop: int | None) -> tuple[fx.Node, list[fx.Node | None]]:
        """Add a source's recipe, on rows [start, stop) of its input with rows; return its output and leaves.

        An input that needs a gradient is detached, and the detached tensor is its leaf; other inputs have None.
        """
        rows, values = source.recipe.rows, source.checked_values() if self.checks else source.unchecked_values()
        dim = 0 if rows is None else source.longest[1]
        nodes = []
        for i, value in enumerate(values):
            has_rows = rows is not None and i == rows.source
            if has_rows:
                self.row_dims.append((len(self.inputs), dim))
                value = value[(slice(None),) * dim + (slice(start, stop),)].contiguous()  # some operators require this layout
            nodes.append(self.add_input(value, rows is not None and not has_rows))
        leaves: list[fx.Node | None] = [None] * len(nodes)
        recorded = source.differentiable
        if recorded:
            self.call(SET_GRAD, True)
            for i in source.leaves():
                detached = self.call(aten.detach.default, nodes[i])
                nodes[i] = leaves[i] = self.graph.call_method("requires_grad_", (detached,))
        program = source.recipe.program
        env = dict(zip(program.graph.find_nodes(op="placeholder"), nodes, strict=True))
        for node in program.graph.nodes:
            if node.op not in ("placeholder", "output"):
                env[node] = self._under_modes(source, node, env, recorded)
        if recorded:
            self.call(SET_GRAD, False)
        return env[program.graph.output_node().args[0]], leaves  # type: ignore[index]

    def _under_modes(self, source: RecomputeSource, node: fx.Node, env: dict[fx.Node, fx.Node], recorded: bool) -> fx.Node:
        """Add a copy of a recipe's node, with the autocasts and grad mode of the call and of its graph around it; return it.

        `env` maps nodes of the recipe to nodes of the graph. `recorded`: autograd records the recipe, unless the graph disabled
        it.
        """
        context = source.recipe.program.contexts.get(node)
        autocasts = [(name, dtype, True, False) for name, dtype, enabled in source.modes.autocasts if enabled]
        entered = [self.call(ENTER_AUTOCAST, *arguments) for arguments in (*autocasts, *(context.autocasts if context else ()))]
        switched = recorded and context is not None and context.grad is False
        if switched:
            self.call(SET_GRAD, False)
        copy = self.graph.node_copy(node, env.__getitem__)
        if switched:
            self.call(SET_GRAD, True)
        for mode in reversed(entered):
            self.call(EXIT_AUTOCAST, mode)
        return copy


@cache
def _sizes_of(func: Any) -> frozenset[str]:
    """Return the names of an operator's arguments that are sizes (`SymInt` in its schema), as opposed to dimensions or modes."""
    return frozenset(re.findall(r"SymInt(?:\[\d*\])?\??\s+(\w+)", str(func._schema)))


# -- running


_versions: dict[Hashable, list[FamilyCode]] = {}


def _run(builder: _GraphBuilder, results: Sequence[fx.Node]) -> Sequence[Any] | None:
    """Run the graph in chunks, and return `results`; None if it cannot run in chunks, or its outputs were computed otherwise.

    From then on, all deferred outputs of the same calls are computed in these chunks.
    """
    code = _code_for(builder, results)
    if code is None or not all(source.chunking.decide(in_chunks=True) for source in builder.sources):
        return None
    with _plain_modes(builder):
        results_in_chunks: Sequence[Any] = code.call(layout_of(builder.inputs)[1], builder.inputs)
        return results_in_chunks


def _code_for(builder: _GraphBuilder, results: Sequence[fx.Node]) -> FamilyCode | None:
    """Return the compiled graph with these results, for the sizes of its inputs; compile it if no earlier code fits.

    Code is shared by equal graphs with inputs of the same dtypes and ranks, and by a *family* of sizes (linear in one length).
    None if the graph cannot run in chunks, or if the limits on the number of graphs and of their versions are reached.
    """
    source = next(iter(builder.sources))
    assert source.chunking.compiler is not None
    builder.graph.output(tuple(results))
    row_chunks = RowChunks(rows_per_chunk_of(source), tuple(builder.row_dims))
    kinds, numbers = layout_of(builder.inputs)
    key = (structure(builder.graph), kinds, tuple(sorted(builder.shared)), source.chunking.compiler, row_chunks)
    if key not in _versions and len(_versions) == MAX_GRAPHS:
        return None
    codes = _versions.setdefault(key, [])
    code = find_code(codes, numbers)
    if code is None and len(codes) < MAX_VERSIONS:
        with compiling(), _plain_modes(builder):
            code = find_code(codes, numbers) or _compiled(builder, widened_family(codes, numbers), numbers, row_chunks)
            codes += [code] if code not in codes else []
    return None if code is None or code.run is _not_streamed else code


@contextmanager
def _plain_modes(builder: _GraphBuilder) -> Iterator[None]:
    """Context manager: disable gradients and autocast, which the graph sets itself, and set the matmul precision of the call."""
    device_types = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    autocasts = tuple((name, torch.get_autocast_dtype(name), False) for name in device_types)
    rounding = next(iter(builder.sources)).modes.rounding
    with Modes(grad=False, inference=torch.is_inference_mode_enabled(), autocasts=autocasts, rounding=rounding).activate():
        yield


def _compiled(builder: _GraphBuilder, family: Family, numbers: Numbers, row_chunks: RowChunks) -> FamilyCode:
    """Return code for the graph and a family of sizes (all sizes of inputs as linear functions of one length).

    `numbers` are the sizes of the current inputs. The code is `_not_streamed` if the graph cannot run in these chunks, if large
    values would exist, or if compilation fails.
    """
    inputs, compiler = builder.inputs, next(iter(builder.sources)).chunking.compiler
    graph = graph_for(fx.GraphModule(torch.nn.Module(), builder.graph), family, inputs)
    tensors = [i for i, value in enumerate(inputs) if isinstance(value, Tensor)]
    compiled_index = {i: tensor_index + (family.at is not None) for tensor_index, i in enumerate(tensors)}
    shared = [compiled_index[i] for i in tensors if i in builder.shared]
    tensor_row_chunks = RowChunks(row_chunks.num_rows, tuple((compiled_index[i], dim) for i, dim in row_chunks.row_dims))

    def compile_graph(graph: fx.GraphModule, values: list[Any]) -> Callable[..., Any]:
        """Return the compiled graph, or `_not_streamed` if the compiler refuses it."""
        assert compiler is not None
        return compiler(graph, values, shared, builder.widest, tensor_row_chunks) or _not_streamed

    try:
        with no_modes():
            if family.at is None:
                return FamilyCode(family, compile_graph(graph, [inputs[i] for i in tensors]), any_size)
            run, holds = with_sizes(compile_graph, graph, numbers[family.at], lambda n: shapes_for(family, n, inputs))
            return FamilyCode(family, run, holds)
    except StreamFXError:
        raise
    except Exception as error:
        log.info("a use of lazy outputs materializes them, because it could not be compiled: %s", error)
        return FamilyCode(family, _not_streamed, any_size)


def _not_streamed(*inputs: Any) -> None:
    """Return None, in place of a graph that does not stream; the caller then materializes the large values."""
    return None
