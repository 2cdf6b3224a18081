"""Insertion of operators into a joint graph, with the fake values (`meta["val"]`) that later passes read."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx

from streamfx.ir.sizes import size_of
from streamfx.node_meta import ORIGIN, VALUE
from streamfx.torch_private import FakeTensor
from streamfx.torch_private.graph_nodes import add_call, like_fake

aten = torch.ops.aten


class GraphWriter:
    """Inserts operators before a given node, and computes their `meta["val"]` from the fake values of their operands."""

    def __init__(self, graph: fx.Graph) -> None:
        """Write to a graph; `new_nodes` collects the nodes that are inserted."""
        self.graph = graph
        self.new_nodes: list[fx.Node] = []
        self._results: dict[Any, tuple[FakeTensor, ...]] = {}  # of `call_alike`, by operator and arguments
        self._mode: Any = None
        self._point: fx.Node | None = None

    def move_before(self, node: fx.Node) -> GraphWriter:
        """Move the insertion point before a node; return this writer, to chain calls."""
        self._point = node
        return self

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Insert an operator, and compute its fake value; return the node."""
        fake_args, fake_kwargs = fx.node.map_arg((args, kwargs), lambda node: node.meta[VALUE])
        return self.insert_call(self.run_on_fakes(target, *fake_args, **fake_kwargs), target, *args, **kwargs)

    def call_alike(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Insert an operator, as `call`; of calls with equal operands (in shape, strides, dtype and device), one runs.

        Its results must be new memory, and may depend on nothing else but other arguments. In a model, most layers are equal.
        """
        fake_args, fake_kwargs = fx.node.map_arg((args, kwargs), lambda node: node.meta[VALUE])
        key = (target, *map(_metadata, fake_args), *((name, _metadata(value)) for name, value in fake_kwargs.items()))
        results = self._results.get(key)
        if results is None:
            value = self._results[key] = self.run_on_fakes(target, *fake_args, **fake_kwargs)
        else:
            value = tuple(map(like_fake, results))
        return self.insert_call(value, target, *args, **kwargs)

    def rows(self, value: fx.Node, dim: int, start: Any, stop: Any) -> fx.Node:
        """Insert a slice of rows [start, stop) of a value along dimension `dim`, and return its node."""
        return self.call(aten.slice.Tensor, value, dim, start, stop)

    def insert_call(self, value: Any, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Insert an operator whose fake value is `value`, and return its node.

        It gets the source line and modules of the node before which it is inserted, and the name of its traced operator
        (`ORIGIN`).
        """
        assert self._point is not None
        with self.graph.inserting_before(self._point):
            node = add_call(self.graph, target, args, kwargs)
        self.new_nodes.append(node)
        node.meta[VALUE] = value
        for key in ("stack_trace", "nn_module_stack", "fwd_nn_module_stack"):
            if key in self._point.meta:
                node.meta[key] = self._point.meta[key]
        node.meta[ORIGIN] = self._point.meta.get(ORIGIN, self._point.name)
        return node

    def run_on_fakes(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function on fake values."""
        with torch.no_grad(), self._fake_mode():
            return function(*args, **kwargs)

    def _fake_mode(self) -> Any:
        """Return the fake mode of the graph's values, or an empty context if none is fake.

        Operators without operands, such as `zeros`, need it to create fake tensors.
        """
        if self._mode is None:
            values = (node.meta.get(VALUE) for node in self.graph.nodes)
            self._mode = next((v.fake_mode for v in values if isinstance(v, FakeTensor)), nullcontext())
        return self._mode


def _metadata(argument: Any) -> Any:
    """Return what fake results depend on, of an argument: of a static tensor, its metadata; other arguments themselves."""
    if type(argument) is not FakeTensor or not all(isinstance(size, int) for size in (*argument.shape, *argument.stride())):
        return argument
    return argument.shape, argument.stride(), argument.dtype, argument.device


def size_arguments(node: fx.Node, writer: GraphWriter) -> list[Any]:
    """Return the sizes of a value as arguments of an operator: integers, or nodes for dynamic sizes.

    Such a node is an input of the graph, or an operand of `node`, if one is this size; else the writer inserts a node that
    reads it.
    """
    shape = node.meta[VALUE].shape
    return [
        size if isinstance(size, int) else find_size_input(size, writer.graph) or _read_size(size, node, dim, writer)
        for dim, size in enumerate(shape)
    ]


def _read_size(size: Any, node: fx.Node, dim: int, writer: GraphWriter) -> fx.Node:
    """Return a node for the dynamic size of dimension `dim` of `node`: an operand that is this size, or an inserted `sym_size`.

    It reads an operand of `node` that has this size, if there is one, because a rewrite may replace `node` itself.
    """
    for operand in node.all_input_nodes:
        value = operand.meta.get(VALUE)
        if isinstance(value, torch.SymInt) and size_of(value) == size_of(size):
            return operand
        if isinstance(value, torch.Tensor):
            operand_dim = next(
                (index for index, operand_size in enumerate(value.shape) if size_of(operand_size) == size_of(size)), None
            )
            if operand_dim is not None:
                return writer.call(aten.sym_size.int, operand, operand_dim)
    return writer.call(aten.sym_size.int, node, dim)


def find_size_input(size: Any, graph: fx.Graph) -> fx.Node | None:
    """Return the graph input that is this dynamic size; None if no input is.

    Operators should use it rather than a node that reads the size: then they depend on no other value of the graph.
    """
    inputs = (node for node in graph.find_nodes(op="placeholder") if isinstance(node.meta.get(VALUE), torch.SymInt))
    return next((node for node in inputs if size_of(node.meta[VALUE]) == size_of(size)), None)


def stride_arguments(node: fx.Node, writer: GraphWriter) -> list[Any]:
    """Return the strides of a value as arguments of an operator: integers, or inserted nodes for dynamic strides."""
    strides = node.meta[VALUE].stride()
    return [
        stride if isinstance(stride, int) else writer.call(aten.sym_stride.int, node, dim) for dim, stride in enumerate(strides)
    ]


def offset_argument(node: fx.Node, writer: GraphWriter) -> Any:
    """Return the storage offset of a value as an argument of an operator: an integer, or an inserted node if it is dynamic."""
    offset = node.meta[VALUE].storage_offset()
    return offset if isinstance(offset, int) else writer.call(aten.sym_storage_offset.default, node)
