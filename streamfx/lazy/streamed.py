"""Small values that hang on large deferred ones, made along the sequence: the large ones never exist.

What a loss on deferred logits asks for (a number, a number per token), and the gradients of what the logits are made from, are
functions of the recipe's inputs and a few small tensors. They are written down as a graph, which the same compiler turns into
loops over chunks, once for all lengths. Where it does not stream, the caller makes the large values instead, as eager would.

    hidden, weight | linear -> float -> log_softmax -> gather(ids) | log-probabilities [b t]
    hidden, weight | linear -> ... -> _log_softmax_backward_data -> autograd.grad(linear) | gradients of hidden and weight
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
from streamfx.lazy.recompute import Modes, RecomputeSource, RowCut
from streamfx.lazy.steps import compacted
from streamfx.log import log
from streamfx.runtime.outer import COPIES_WHERE_NEEDED
from streamfx.runtime.shape_families import (
    Family,
    FamilyCode,
    Numbers,
    any_size,
    fitting,
    graph_for,
    layout_of,
    shapes_for,
    wider,
)
from streamfx.torch_private import ENTER_AUTOCAST, EXIT_AUTOCAST, SET_GRAD, no_modes
from streamfx.torch_private.dynamo import compiling
from streamfx.torch_private.symbolic_sizes import with_sizes

aten = torch.ops.aten
MOST_GRAPHS = 64  # compiled in one process: a program that asks for more has numbers in it that never repeat
MOST_FORMS = 6  # of one graph, for sizes that do not belong together


def made_in_chunks(cells: Sequence[Cell]) -> Sequence[Tensor] | None:
    """The values of cells, without the large ones that they are made of; None where that does not stream."""
    writer = _GraphBuilder()
    results = [writer.node(cell) for cell in cells]
    return _run(writer, results) if writer.may_cut() else None


def gradients_in_chunks(source: RecomputeSource, gradient: Cell) -> Sequence[Tensor | None] | None:
    """The gradients of what a source is made from, one for each given value, from that of its output."""
    writer = _GraphBuilder()
    driving = writer.node(gradient)
    output, leaves = writer.recorded(source)
    positions = [position for position, leaf in enumerate(leaves) if leaf is not None]
    found = writer.call(torch.autograd.grad, (output,), [leaves[p] for p in positions], (driving,), allow_unused=True)
    results = [writer.call(operator.getitem, found, number) for number in range(len(positions))]
    made = _run(writer, results) if writer.may_cut() else None
    if made is None:
        return None
    by_position = dict(zip(positions, made, strict=True))
    return [by_position.get(position) for position in range(len(leaves))]


class RowsInChunks:
    """Makes rows of a source in the chunks that all passes over it have: by the same operators, on as many rows at a time."""

    def can_cut(self, source: RecomputeSource) -> bool:
        """Whether the source is large, and streams in chunks of its own."""
        if source.numel < steps.LEAST or source.recipe.rows is None or source.agreement.compiler is None:
            return False
        writer = _GraphBuilder(checks=False)
        return _form(writer, [writer.whole(source)]) is not None

    def rows(self, source: RecomputeSource, start: int, stop: int) -> Tensor:
        """Rows along the longest dimension of rows. The chunks that they are in are made."""
        step, (dim, _) = rows_of(source), source.longest
        first = max(0, min(start, stop - 2)) // step * step  # a single row is no sequence
        last = min(source.length, -(-stop // step) * step)
        for bounds in ((first, last), (0, source.length)):
            writer = _GraphBuilder()
            made = _run(writer, [writer.whole(source, *bounds)])
            if made is not None:
                part: Tensor = made[0].narrow(dim, start - bounds[0], stop - start)
                return part
        raise AssertionError("what streams once streams again")


def rows_of(source: RecomputeSource) -> int:
    """Rows of a chunk, in every pass over the source."""
    compiler = source.agreement.compiler
    return compiler.rows_per_chunk(source.numel, source.length) if compiler is not None else source.length


class _GraphBuilder:
    """Writes cells down as a graph of their sources' inputs, of small tensors and of sizes."""

    def __init__(self, checks: bool = True) -> None:
        self.checks = checks  # whether the inputs are what they were in the call
        self.graph = fx.Graph()
        self.inputs: list[Any] = []
        self.shared: set[int] = set()  # positions of inputs that no row is of: weights
        self.widest = 0
        self._cells: dict[Cell, fx.Node] = {}
        self._steps: dict[DeferredOperator, fx.Node] = {}
        self.sources: dict[RecomputeSource, tuple[fx.Node, list[fx.Node | None]]] = {}
        self.along: list[tuple[int, int]] = []  # positions of inputs that rows are made of, and which dimension has the rows
        self._last: fx.Node | None = None

    def call(self, function: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(function, args, kwargs)

    def given(self, value: Any, is_shared: bool = False) -> fx.Node:
        """An input of the graph: a tensor, or a size."""
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
        """A small tensor; what is repeated in it is repeated in the graph, where that takes no memory."""
        compact = compacted(value)
        made = self.given(compact)
        if compact is value:
            return made
        sizes = [self.size(given) if given != own else given for given, own in zip(value.shape, compact.shape, strict=True)]
        return self.call(aten.expand.default, made, sizes)

    def size(self, number: int) -> Any:
        """A number as an input, so that another length is the same graph; 0, 1 and what means "all" stay what they are."""
        return self.given(number) if 2 <= number < 1 << 31 else number

    def node(self, cell: Cell) -> fx.Node:
        if cell not in self._cells:
            self._cells[cell] = self._written(cell)
        return self._cells[cell]

    def _written(self, cell: Cell) -> fx.Node:
        step, value = cell.step, cell.value  # in this order: see NOTE [Cells that several threads read]
        if value is not None:
            return self.tensor(value)
        self.widest = max(self.widest, cell.numel)
        if cell.source is not None:
            return self.whole(cell.source)
        assert step is not None
        if step not in self._steps:
            self._steps[step] = self._called(step)
        made = self._steps[step]
        return made if cell.result is None else self.call(operator.getitem, made, cell.result)

    def _called(self, step: DeferredOperator) -> fx.Node:
        """An operator; its sizes become inputs."""
        sizes = _sizes_of(step.func)
        names = [argument.name for argument in step.func._schema.arguments]

        def written(name: str, item: Any) -> Any:
            if isinstance(item, Cell):
                return self.node(item)
            if isinstance(item, Tensor):
                return self.tensor(item)
            return self.size(item) if name in sizes and type(item) is int else item

        args = [
            pytree.tree_map(lambda item, name=name: written(name, item), value)
            for name, value in zip(names, step.args, strict=False)
        ]
        kwargs = {
            name: pytree.tree_map(lambda item, name=name: written(name, item), value) for name, value in step.kwargs.items()
        }
        return self.call(COPIES_WHERE_NEEDED.get(step.func, step.func), *args, **kwargs)

    def whole(self, source: RecomputeSource, start: int = 0, stop: int | None = None) -> fx.Node:
        """The output of a source's recipe, or some of its rows."""
        self.widest = max(self.widest, source.numel)
        return self.call(aten.detach.default, self.recorded(source, start, stop)[0])

    def recorded(self, source: RecomputeSource, start: int = 0, stop: int | None = None) -> tuple[fx.Node, list[fx.Node | None]]:
        """The output of a source's recipe, and the leaves that gradients are asked for, one for each given value.

        It is recorded whether a gradient is taken or not, so that it is made by the same operators in both.
        """
        if source not in self.sources:
            self.sources[source] = self._recipe(source, start, stop)
        return self.sources[source]

    def may_cut(self) -> bool:
        """Whether all sources may be made in chunks, and have equally long ones."""
        return all(source.agreement.may_cut() for source in self.sources) and len({*map(rows_of, self.sources)}) == 1

    def _recipe(self, source: RecomputeSource, start: int, stop: int | None) -> tuple[fx.Node, list[fx.Node | None]]:
        rows, values = source.recipe.rows, source.current() if self.checks else source.unchecked()
        place = 0 if rows is None else source.longest[1]
        nodes = []
        for i, value in enumerate(values):
            has_rows = rows is not None and i == rows.given
            if has_rows:
                self.along.append((len(self.inputs), place))
                value = value[(slice(None),) * place + (slice(start, stop),)].contiguous()  # operators ask for the layout
            nodes.append(self.given(value, rows is not None and not has_rows))
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
        """A function of a recipe, under the modes of its call."""
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
    """The arguments of an operator that are sizes, rather than numbers of dimensions or modes."""
    return frozenset(re.findall(r"SymInt(?:\[\d*\])?\??\s+(\w+)", str(func._schema)))


# -- running


_forms: dict[Hashable, list[FamilyCode]] = {}


def _run(writer: _GraphBuilder, results: Sequence[fx.Node]) -> Sequence[Any] | None:
    """The results, made in chunks: from then on all that the call gave is made in these."""
    form = _form(writer, results)
    if form is None or not all(source.agreement.settled(in_chunks=True) for source in writer.sources):
        return None
    with _plain_modes(writer):
        made: Sequence[Any] = form.call(layout_of(writer.inputs)[1], writer.inputs)
        return made


def _form(writer: _GraphBuilder, results: Sequence[fx.Node]) -> FamilyCode | None:
    """The code for a graph and its sizes; None where it does not stream, or where there is too much code by now."""
    first = next(iter(writer.sources))
    assert first.agreement.compiler is not None
    writer.graph.output(tuple(results))
    cut = RowCut(rows_of(first), tuple(writer.along))
    kinds, numbers = layout_of(writer.inputs)
    key = (structure(writer.graph), kinds, tuple(sorted(writer.shared)), first.agreement.compiler, cut)
    if key not in _forms and len(_forms) == MOST_GRAPHS:
        return None
    forms = _forms.setdefault(key, [])
    form = fitting(forms, numbers)
    if form is None and len(forms) < MOST_FORMS:
        with compiling(), _plain_modes(writer):
            form = fitting(forms, numbers) or _compiled(writer, wider(forms, numbers), numbers, cut)
            forms += [form] if form not in forms else []
    return None if form is None or form.run is _nothing else form


@contextmanager
def _plain_modes(writer: _GraphBuilder) -> Iterator[None]:
    """No gradients, no autocast: the graph says itself what it wants of these."""
    device_types = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    autocasts = tuple((name, torch.get_autocast_dtype(name), False) for name in device_types)
    rounding = next(iter(writer.sources)).modes.rounding
    with Modes(grad=False, inference=torch.is_inference_mode_enabled(), autocasts=autocasts, rounding=rounding).restored():
        yield


def _compiled(writer: _GraphBuilder, family: Family, numbers: Numbers, cut: RowCut) -> FamilyCode:
    """The graph as loops, for sizes of a family; a form that gives nothing where that does not keep large values away."""
    inputs, compiler = writer.inputs, next(iter(writer.sources)).agreement.compiler
    graph = graph_for(fx.GraphModule(torch.nn.Module(), writer.graph), family, inputs)
    tensors = [position for position, value in enumerate(inputs) if isinstance(value, Tensor)]
    place = {position: i + (family.at is not None) for i, position in enumerate(tensors)}
    shared = [place[position] for position in tensors if position in writer.shared]
    placed = RowCut(cut.rows, tuple((place[position], dim) for position, dim in cut.along))

    def compile(graph: fx.GraphModule, values: list[Any]) -> Callable[..., Any]:
        assert compiler is not None
        return compiler(graph, values, shared, writer.widest, placed) or _nothing

    try:
        with no_modes():
            if family.at is None:
                return FamilyCode(family, compile(graph, [inputs[position] for position in tensors]), any_size)
            run, holds = with_sizes(compile, graph, numbers[family.at], lambda n: shapes_for(family, n, inputs))
            return FamilyCode(family, run, holds)
    except StreamFXError:
        raise
    except Exception as error:
        log.info("a use of deferred outputs makes them whole: %s", error)
        return FamilyCode(family, _nothing, any_size)


def _nothing(*inputs: Any) -> None:
    return None
