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
from streamfx.ir.structure import structure
from streamfx.log import log
from streamfx.runtime.cells import Cell, Step
from streamfx.runtime.forms import Family, Form, Numbers, any_size, fitting, graph_for, layout_of, shapes_for, wider
from streamfx.runtime.outer import COPIES_WHERE_NEEDED
from streamfx.runtime.rebuild import Modes, Source, UseCompiler
from streamfx.runtime.steps import compacted
from streamfx.torch_private import ENTER_AUTOCAST, EXIT_AUTOCAST, SET_GRAD, compiling, no_modes, with_sizes

aten = torch.ops.aten
MOST_GRAPHS = 64  # compiled in one process: a program that asks for more has numbers in it that never repeat
MOST_FORMS = 6  # of one graph, for sizes that do not belong together


def made_in_chunks(cells: Sequence[Cell]) -> Sequence[Tensor] | None:
    """The values of cells, without the large ones that they are made of; None where that does not stream."""
    writer = _Writer(with_gradients_of=None)
    return _run(writer, [writer.node(cell) for cell in cells])


def gradients_in_chunks(source: Source, gradient: Cell) -> Sequence[Tensor | None] | None:
    """The gradients of what a source is made from, one for each given value, from that of its output."""
    writer = _Writer(with_gradients_of=source)
    driving = writer.node(gradient)
    output, leaves = writer.recorded(source)
    positions = [position for position, leaf in enumerate(leaves) if leaf is not None]
    found = writer.call(torch.autograd.grad, (output,), [leaves[p] for p in positions], (driving,), allow_unused=True)
    made = _run(writer, [writer.call(operator.getitem, found, number) for number in range(len(positions))])
    if made is None:
        return None
    by_position = dict(zip(positions, made, strict=True))
    return [by_position.get(position) for position in range(len(leaves))]


class _Writer:
    """Writes cells down as a graph of their sources' inputs, of small tensors and of sizes."""

    def __init__(self, with_gradients_of: Source | None) -> None:
        self.graph = fx.Graph()
        self.inputs: list[Any] = []
        self.shared: set[int] = set()  # positions of inputs that no row is of: weights
        self.compiler: UseCompiler | None = None
        self.widest = 0
        self._driven = with_gradients_of
        self._cells: dict[Cell, fx.Node] = {}
        self._steps: dict[Step, fx.Node] = {}
        self._sources: dict[Source, tuple[fx.Node, list[fx.Node | None]]] = {}
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
            return self.call(aten.detach.default, self.recorded(cell.source)[0])
        assert step is not None
        if step not in self._steps:
            self._steps[step] = self._called(step)
        made = self._steps[step]
        return made if cell.result is None else self.call(operator.getitem, made, cell.result)

    def _called(self, step: Step) -> fx.Node:
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

    def recorded(self, source: Source) -> tuple[fx.Node, list[fx.Node | None]]:
        """The output of a source's recipe, and the leaves that gradients are asked for, one for each given value."""
        if source not in self._sources:
            self.compiler = self.compiler or source.compiler
            self._sources[source] = self._recipe(source)
        return self._sources[source]

    def _recipe(self, source: Source) -> tuple[fx.Node, list[fx.Node | None]]:
        rows = source.recipe.rows
        nodes = [self.given(value, rows is not None and i != rows.given) for i, value in enumerate(source.current())]
        leaves: list[fx.Node | None] = [None] * len(nodes)
        is_driven = source is self._driven
        if is_driven:
            self.call(SET_GRAD, True)
            for i in source.leaves():
                detached = self.call(aten.detach.default, nodes[i])
                nodes[i] = leaves[i] = self.graph.call_method("requires_grad_", (detached,))
        program = source.recipe.program
        env = dict(zip(program.graph.find_nodes(op="placeholder"), nodes, strict=True))
        for node in program.graph.nodes:
            if node.op not in ("placeholder", "output"):
                env[node] = self._under_modes(source, node, env, is_driven)
        if is_driven:
            self.call(SET_GRAD, False)
        return env[program.graph.output_node().args[0]], leaves  # type: ignore[index]

    def _under_modes(self, source: Source, node: fx.Node, env: dict[fx.Node, fx.Node], is_driven: bool) -> fx.Node:
        """A function of a recipe, under the modes of its call."""
        context = source.recipe.program.contexts.get(node)
        autocasts = [(name, dtype, True, False) for name, dtype, enabled in source.modes.autocasts if enabled]
        entered = [self.call(ENTER_AUTOCAST, *arguments) for arguments in (*autocasts, *(context.autocasts if context else ()))]
        switched = is_driven and context is not None and context.grad is False
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


_forms: dict[Hashable, list[Form]] = {}


def _run(writer: _Writer, results: Sequence[fx.Node]) -> Sequence[Any] | None:
    if writer.compiler is None:
        return None
    writer.graph.output(tuple(results))
    kinds, numbers = layout_of(writer.inputs)
    key = (structure(writer.graph), kinds, tuple(sorted(writer.shared)), writer.compiler)
    if key not in _forms and len(_forms) == MOST_GRAPHS:
        return None
    forms = _forms.setdefault(key, [])
    with _plain_modes():
        form = fitting(forms, numbers)
        if form is None and len(forms) < MOST_FORMS:
            with compiling():
                form = fitting(forms, numbers) or _compiled(writer, wider(forms, numbers), numbers)
                forms += [form] if form not in forms else []
        return None if form is None else form.call(numbers, writer.inputs)


@contextmanager
def _plain_modes() -> Iterator[None]:
    """No gradients, no autocast: the graph says itself what it wants of these."""
    device_types = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    autocasts = tuple((name, torch.get_autocast_dtype(name), False) for name in device_types)
    with Modes(grad=False, inference=torch.is_inference_mode_enabled(), autocasts=autocasts).restored():
        yield


def _compiled(writer: _Writer, family: Family, numbers: Numbers) -> Form:
    """The graph as loops, for sizes of a family; a form that gives nothing where that does not keep large values away."""
    inputs, compiler = writer.inputs, writer.compiler
    graph = graph_for(fx.GraphModule(torch.nn.Module(), writer.graph), family, inputs)
    tensors = [position for position, value in enumerate(inputs) if isinstance(value, Tensor)]
    shared = [place + (family.at is not None) for place, position in enumerate(tensors) if position in writer.shared]

    def compile(graph: fx.GraphModule, values: list[Any]) -> Callable[..., Any]:
        assert compiler is not None
        return compiler(graph, values, shared, writer.widest) or _nothing

    try:
        with no_modes():
            if family.at is None:
                return Form(family, compile(graph, [inputs[position] for position in tensors]), any_size)
            run, holds = with_sizes(compile, graph, numbers[family.at], lambda n: shapes_for(family, n, inputs))
            return Form(family, run, holds)
    except StreamFXError:
        raise
    except Exception as error:
        log.info("a use of deferred outputs makes them whole: %s", error)
        return Form(family, _nothing, any_size)


def _nothing(*inputs: Any) -> None:
    return None
