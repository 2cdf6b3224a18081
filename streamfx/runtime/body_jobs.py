"""A segment of a loop body as bytes, from which this process and another one compile the same code.

The other process compiles first, so that Inductor's cache on disk has the code; this process then compiles the same bytes,
and Inductor finds the code in the cache.
"""

from __future__ import annotations

import functools
import hashlib
import operator
import pickle
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import fx

from streamfx.runtime.shape_families import Family, FamilyCode, Numbers, any_size, graph_for, shapes_for
from streamfx.torch_private import OpOverload, tree_map
from streamfx.torch_private.inductor import compile_for_fixed_sizes, compile_for_sizes
from streamfx.torch_private.inductor_cache import cache_folder

VERSION = 1  # of the format; a part of each key


class UnknownOperatorError(Exception):
    """The graph contains an operator that this process does not know; another process may have registered it."""


@dataclass(frozen=True)
class NodeName:
    """A node among the arguments of another node."""

    name: str


@dataclass(frozen=True)
class BodyJob:
    """A segment to compile for a family of sizes.

    `nodes` is the graph (see `encode_graph`), `kinds` are the dtype, device and rank of each input, `numbers` the sizes and
    strides for which the code is optimized, and `settings` those of Inductor.
    """

    nodes: tuple[Any, ...]
    kinds: tuple[Any, ...]
    family: Family
    numbers: Numbers
    settings: bytes

    @cached_property
    def encoded(self) -> bytes:
        """The job for another process."""
        return pickle.dumps((VERSION, self.nodes, self.kinds, self.family, self.numbers, self.settings))

    @cached_property
    def key(self) -> str:
        """A name of the job, equal in all processes. (Equal jobs may differ in `encoded`, which depends on object identity.)"""
        text = repr((VERSION, self.nodes, self.kinds, self.family, self.numbers, settings_text(self.settings)))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @property
    def marker(self) -> Path:
        """The path of a file that exists if Inductor's cache has the code."""
        return Path(cache_folder(), "streamfx", self.key)

    def is_in_cache(self) -> bool:
        """Return whether a process has compiled this job into Inductor's cache."""
        return self.marker.exists()

    def mark_as_cached(self) -> None:
        """Create the marker: Inductor's cache has the code."""
        self.marker.parent.mkdir(parents=True, exist_ok=True)
        self.marker.touch()

    def compile(self) -> FamilyCode:
        """Compile the segment.

        Raises:
            UnknownOperatorError: the graph contains an operator that this process does not know.
            InductorFailedError: Inductor fails.
        """
        inputs = self._examples()
        graph = graph_for(decode_graph(self.nodes), self.family, inputs)
        shapes = partial(shapes_for, self.family, inputs=inputs)
        if self.family.at is None:
            return FamilyCode(self.family, compile_for_fixed_sizes(graph, shapes(None)), any_size)
        return FamilyCode(self.family, *compile_for_sizes(graph, self.numbers[self.family.at], shapes))

    def eager_code(self, module: fx.GraphModule) -> FamilyCode:
        """Return code that runs the segment eagerly; `module` is the segment."""
        return FamilyCode(self.family, graph_for(module, self.family, self._examples()), any_size)

    def _examples(self) -> list[Any]:
        """Return an input of each kind, of which only the dtype, the device and the rank count."""
        return [0 if kind == "number" else torch.empty([0] * kind[2], dtype=kind[0], device=kind[1]) for kind in self.kinds]


@functools.lru_cache(maxsize=8)
def settings_text(settings: bytes) -> str:
    """Return settings as text that is equal in all processes."""
    return repr(pickle.loads(settings))


def decode_job(encoded: bytes) -> BodyJob:
    """Return the job with this encoding."""
    _, *values = pickle.loads(encoded)
    return BodyJob(*values)


def is_portable(kinds: tuple[Any, ...]) -> bool:
    """Return whether all inputs of a segment are numbers or on a CPU: for other devices, this process compiles."""
    return all(kind == "number" or kind[1].type == "cpu" for kind in kinds)


def encode_graph(graph: fx.Graph) -> tuple[Any, ...] | None:
    """Return a graph of operators as plain values: (op, name, operator, arguments) of each node.

    Return None if a node calls something other than an operator or `getitem`. Names are kept.
    """
    nodes = []
    for node in graph.nodes:
        target: Any = None
        if node.op == "call_function":
            if isinstance(node.target, OpOverload):
                target = str(node.target)
            elif node.target is not operator.getitem:
                return None
        elif node.op not in ("placeholder", "output"):
            return None
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), name_of)
        nodes.append((node.op, node.name, target, args, kwargs))
    return tuple(nodes)


def name_of(node: fx.Node) -> Any:
    """Return a node as a plain value."""
    return NodeName(node.name)


def decode_graph(nodes: tuple[Any, ...]) -> fx.GraphModule:
    """Return the graph that `encode_graph` returned as plain values; raise `UnknownOperatorError` for an unknown operator."""
    graph = fx.Graph()
    copies: dict[str, fx.Node] = {}
    for op, name, operator_name, args, kwargs in nodes:
        args, kwargs = tree_map(lambda value: copies[value.name] if isinstance(value, NodeName) else value, (args, kwargs))
        if op == "placeholder":
            copies[name] = graph.placeholder(name)
        elif op == "output":
            graph.output(*args)
        else:
            target = operator.getitem if operator_name is None else find_operator(operator_name)
            copies[name] = graph.create_node(op, target, tuple(args), dict(kwargs), name)
    return fx.GraphModule(torch.nn.Module(), graph)


def find_operator(name: str) -> Any:
    """Return the operator with a name such as `aten.mm.default`."""
    try:
        return functools.reduce(getattr, name.split("."), torch.ops)
    except AttributeError as error:
        raise UnknownOperatorError(name) from error
