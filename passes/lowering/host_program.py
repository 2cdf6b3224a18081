"""Build a host program: the graph that replaces the forward or backward graph. Its nodes are loops over chunks, and the few
operators that run once, on full values, before, between and after them.

A *region* is all loops of a stage in one direction. The *states* of a scan are its carry at the start of each chunk, which a
loop stores so that the backward loop can recompute a chunk. The *traced strides* and *places* are those of the user's graph,
on which views in user code may depend.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import chain, count
from typing import Any

import sympy
import torch
from torch import fx

from streamfx.ir.access import Layout
from streamfx.ir.joint import bound_arguments, is_size, is_tensor, node_argument, shape_of_node
from streamfx.ir.sizes import Size, free_symbols, numeric, product, size_of
from streamfx.ir.stage_plan import ChunkSize, StagePlan
from streamfx.node_meta import CONSTANT, FORWARD_OPERATOR, GRAPH, JOINT, REGION, STACKED, TRACED_NAME, TRACED_STRIDES, VALUE
from streamfx.passes.lowering.bodies import BodyBuilder
from streamfx.passes.ops.aliasing import MemoryPlace
from streamfx.passes.ops.fallback import FallbackError
from streamfx.passes.ops.traits import is_tuple_item
from streamfx.passes.partition.loop_distribution import Region
from streamfx.passes.partition.value_table import is_loop_value
from streamfx.runtime.chunked_recurrences import Recurrence
from streamfx.runtime.chunked_scans import carry_type
from streamfx.runtime.loop import Loop
from streamfx.runtime.outer import COPYING_VIEWS
from streamfx.runtime.restride import restride, restride_at, restride_together, view_of_storage
from streamfx.runtime.runtime_sizes import SizeOf
from streamfx.torch_private.graph_nodes import add_call

aten = torch.ops.aten
CHUNK_SIZES_DIFFER = "{target} carries a state from chunk to chunk, and its forward and backward loops have different chunk sizes"


class HostProgramBuilder:
    """Builds the forward or backward host program.

    `value` returns the node of a value of the joint graph; a subclass adds placeholders for values that this program
    does not compute (a primal, a tangent, a saved value).
    """

    def __init__(self, layout: Layout, order: dict[fx.Node, int], plan: StagePlan) -> None:
        """Begin with an empty graph. `env` maps values of the joint graph to nodes; `num_regions` counts those emitted."""
        self.layout, self.order, self.plan = layout, order, plan
        self.graph = fx.Graph()
        self.module = torch.nn.Module()
        self.env: dict[fx.Node, fx.Node] = {}
        self.symbols: dict[sympy.Symbol, Any] = {}
        self.states: dict[fx.Node, fx.Node] = {}
        self.chunks_of_states: dict[fx.Node, ChunkSize] = {}
        self.loops: list[Loop] = []
        self.num_regions = 0

    def has(self, node: fx.Node) -> bool:
        """Return whether a value exists at this point of the program."""
        return node in self.env

    def value(self, node: fx.Node) -> fx.Node | None:
        """Return the node of a value of the joint graph that exists between loops at this point; None if it does not."""
        return self.env.get(node)

    def symbol(self, symbol: sympy.Symbol) -> Any:
        """Return the node of a dynamic-shape symbol's value: of an input, or read from the shape of a value or from data.

        Raise `KeyError` if nothing defines the symbol.
        """
        if symbol not in self.symbols:
            self.symbols[symbol] = self._symbol_from_shape(symbol)
        return self.symbols[symbol]

    def _symbol_from_shape(self, symbol: sympy.Symbol) -> fx.Node:
        """Emit and return the value of a symbol, read from the shape of a value, or else from data."""
        for node in filter(is_tensor, self.env):
            for dim, size in enumerate(shape_of_node(node)):
                if size == symbol:
                    size_node = self.graph.call_function(aten.sym_size.int, (self.env[node], dim))
                    size_node.meta[VALUE] = node.meta[VALUE].shape[dim]
                    return size_node
        return self._symbol_from_data(symbol)

    def _symbol_from_data(self, symbol: sympy.Symbol) -> fx.Node:
        """Emit and return the scalar that an operator reads from data; a KeyError if no operator defines the symbol."""
        readers = (node for node in self.order if node.target is aten._local_scalar_dense.default)
        node = next((node for node in readers if free_symbols([size_of(node.meta[VALUE])]) == {symbol}), None)
        if node is None:
            raise KeyError(symbol)
        self.emit(node)
        return self.env[node]

    def size_argument(self, size: Size) -> Any:
        """Return a size as an argument: a literal, or a node that computes it from symbols."""
        if isinstance(size, int):
            return size
        if isinstance(size, sympy.Symbol):
            return self.symbol(size)
        symbols = sorted(free_symbols([size]), key=str)
        name = f"size_{len([child for child in self.module.children() if isinstance(child, SizeOf)])}"
        self.module.add_module(name, SizeOf(size, tuple(symbols)))
        call = self.graph.call_module(name, tuple(self.symbol(symbol) for symbol in symbols))
        call.meta[VALUE] = numeric(size)
        return call

    def emit(self, node: fx.Node) -> None:
        """Copy an operator that runs once, outside loops, on full values, unless this program has it; set its `env`.

        If it returns a tuple, also emit the elements. Operands that this program does not have are emitted first.
        """
        if self.has(node):
            return
        if node.op == "get_attr":
            self._emit_constant(node)
            return

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._argument_mapper(node))
        copy = add_call(self.graph, COPYING_VIEWS.get(node.target, node.target), args, dict(kwargs))
        copy.meta = {**node.meta, TRACED_NAME: node.name, REGION: self.num_regions}
        self.env[node] = copy
        for user in node.users:
            if is_tuple_item(user) and user not in self.env and is_tensor(user):
                self.emit(user)

    def _argument_mapper(self, node: fx.Node) -> Callable[[fx.Node], Any]:
        """Return the function that maps an argument node of the joint graph to the copied operator's argument.

        It must be called once per argument, in order. Operators that read memory (opaque ones) get tensors with traced strides.
        """
        layouts = iter(node.meta.get(TRACED_STRIDES, ()))

        def map_argument(argument: fx.Node) -> Any:
            """Return the argument of the copied operator for an argument of the joint graph."""
            if is_size(argument):
                return self.size_argument(size_of(argument.meta[VALUE]))
            value = self.operand(argument)
            strides = next(layouts, None) if is_tensor(argument) else None
            return value if strides is None else self.restride(value, argument, strides)

        return map_argument

    def restride(self, value: fx.Node, node: fx.Node, strides: tuple[Size, ...]) -> fx.Node:
        """Emit a copy of a value (of `node` in the joint graph) with its traced strides, unless it has them; return the node.

        Inputs have them, and results of loops are contiguous.
        """
        if node.op == "placeholder" or (value.meta.get(STACKED) and _are_dense(strides, shape_of_node(node))):
            return value
        call = self.graph.call_function(restride, (value, *(self.size_argument(stride) for stride in strides)))
        call.meta = {VALUE: node.meta[VALUE], JOINT: node.name}
        return call

    def place_at_offset(self, value: fx.Node, place: MemoryPlace) -> fx.Node:
        """Emit the call that returns a result at its traced offset and strides: itself if it has them, else a copy; return it."""
        offset, *strides = (self.size_argument(size) for size in (place.offset, *place.strides))
        call = self.graph.call_function(restride_at, (value, offset, *strides))
        call.meta = dict(value.meta)
        return call

    def place_in_one_storage(self, values: Sequence[fx.Node], places: Sequence[MemoryPlace]) -> list[fx.Node]:
        """Emit a copy of these results into one new storage, each at its traced offset and strides; return the views."""
        offsets = [self.size_argument(place.offset) for place in places]
        strides = [[self.size_argument(stride) for stride in place.strides] for place in places]
        call = self.graph.call_function(restride_together, (list(values), offsets, strides))
        views = [self.graph.call_function(operator.getitem, (call, i)) for i in range(len(values))]
        for view, value in zip(views, values, strict=True):
            view.meta = dict(value.meta)
        return views

    def view_of_storage(self, base: fx.Node, node: fx.Node, place: MemoryPlace) -> fx.Node:
        """Emit a view of the storage of `base` with the dtype and shape of `node`, at its traced offset and strides."""
        sizes = shape_of_node(node)
        sizes_and_strides = (self.size_argument(item) for item in (*sizes, *place.strides))
        arguments = base, node.meta[VALUE].dtype, self.size_argument(place.offset), len(sizes), *sizes_and_strides
        call = self.graph.call_function(view_of_storage, arguments)
        call.meta = {VALUE: node.meta[VALUE], JOINT: node.name}
        return call

    def _emit_constant(self, node: fx.Node) -> None:
        """Register a constant of the joint graph (a tensor, or a subgraph) as an attribute of the module; set its `env`."""
        name = f"constant_{node.name}"
        if GRAPH in node.meta:
            self.module.add_module(name, node.meta[GRAPH])
        else:
            self.module.register_buffer(name, node.meta[CONSTANT], persistent=False)
        self.env[node] = self.graph.get_attr(name)
        self.env[node].meta = dict(node.meta)

    def operand(self, node: fx.Node) -> fx.Node:
        """Return the node of a value, emitting its operator first if necessary."""
        value = self.value(node)
        if value is None:
            self.emit(node)
            value = self.env[node]
        return value

    def states_of(self, node: fx.Node) -> fx.Node | None:
        """Return the node of a scan's states (its carry at the start of each chunk); None if no loop has stored them."""
        return self.states.get(node)

    def chunks_of(self, region: Region) -> ChunkSize | None:
        """Return the chunk size of the loop that stored the states that a region reads; None if it reads none."""
        forward_nodes = [node.meta.get(FORWARD_OPERATOR, node) for node in region.nodes]
        return next((self.chunks_of_states[node] for node in forward_nodes if node in self.chunks_of_states), None)

    def _states_for(self, node: fx.Node, chunk_size: ChunkSize) -> fx.Node | None:
        """Return a scan's stored states; None if there are none. Raise `FallbackError` if stored with another chunk size."""
        states = self.states_of(node)
        if states is not None and self.chunks_of_states[node] != chunk_size:
            raise FallbackError(node, CHUNK_SIZES_DIFFER.format(target=node.target))
        return states

    def emit_region(self, name: str, region: Region, chunk_size: ChunkSize) -> None:
        """Emit a region (all loops of a stage in one direction): its loops, and the operators before, between and after them.

        `name`: of the loops; they get a number if there are several. A value between loops is emitted before its `loop_index`.
        """
        full_values: dict[int, list[fx.Node]] = {}
        for node in region.nodes:
            if is_tensor(node) and not is_loop_value(node, self.layout):
                full_values.setdefault(region.loop_index[node], []).append(node)
        for loop_index in range(len(region.loops) + 1):
            for node in full_values.get(loop_index, ()):
                self._emit_with_producer(node)
            if loop_index < len(region.loops):
                loop_name = name if len(region.loops) == 1 else f"{name}_{loop_index}"
                self._emit_loop(self._unique_name(loop_name), region, loop_index, chunk_size)
        self.num_regions += 1

    def _unique_name(self, name: str) -> str:
        """Return the name, with a suffix if it is taken: stages of one module share a name."""
        candidates = chain((name,), (f"{name}_{suffix}" for suffix in count(2)))
        return next(candidate for candidate in candidates if not hasattr(self.module, candidate))

    def _emit_with_producer(self, node: fx.Node) -> None:
        """Emit an operator; for an element of a tuple, emit the operator that returns the tuple first."""
        if is_tuple_item(node) and not self.has(node_argument(node)):
            self.emit(node_argument(node))
        self.emit(node)

    def _emit_loop(self, name: str, region: Region, loop_index: int, chunk_size: ChunkSize) -> None:
        """Build one loop of a region, emit its call, and set the `env` of its results and the `states` of its scans."""
        builder = BodyBuilder(
            self.layout, self.value, self.order, region.reverse, self.plan, lambda node: self._states_for(node, chunk_size)
        )
        spec, sources, returned = builder.finish(name, region.loops[loop_index], chunk_size)
        loop = Loop(spec)
        self.module.add_module(name, loop)
        self.loops.append(loop)
        symbols = tuple(self.symbol(symbol) for symbol in spec.symbols)
        call = self.graph.call_module(name, (*symbols, *sources))
        call.meta[REGION] = self.num_regions
        for i, node in enumerate(returned):
            result = add_call(self.graph, operator.getitem, (call, i))
            result.meta = {VALUE: node.meta[VALUE], JOINT: node.name, STACKED: True}
            self.env[node] = result
        for i, node in enumerate(builder.states, len(returned)):
            result = add_call(self.graph, operator.getitem, (call, i))
            result.meta = {VALUE: fake_states(node), JOINT: node.name}
            self.states[node], self.chunks_of_states[node] = result, chunk_size


def _are_dense(strides: tuple[Size, ...], shape: tuple[Size, ...]) -> bool:
    """Return whether the strides are contiguous; the stride of a dimension of size one is ignored."""
    return all(
        size == 1 or stride == product(shape[dim + 1 :]) for dim, (size, stride) in enumerate(zip(shape, strides, strict=True))
    )


def fake_states(node: fx.Node) -> torch.Tensor:
    """Return a fake value for a scan's states, with one state, because the number of chunks is known at run time only."""
    value = node.meta[VALUE]
    if isinstance(node.target, Recurrence):
        return value[0].new_empty((1, numeric(node.target.carry_size)), dtype=torch.uint8)  # type: ignore[no-any-return]
    row: torch.Tensor = value.narrow(bound_arguments(node)["dim"], 0, 1)
    return row.new_empty((1, row.numel() * carry_type(row.dtype).itemsize), dtype=torch.uint8)
