"""The law of a rule: an operator on the rows of a chunk, with the operands it demands, gives the chunk of its results.

A graph of one operator goes through the compiler's own passes with any of its axes as the sequence, so that the rule
is used as the compiler uses it: axis labels, axes, access roles, chunk sizes, sums over chunks.
"""

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from streamfx.ir.axis_table import AxisFactor
from streamfx.ir.facts import AxisFacts, Facts, SequenceAxis, StorageClass
from streamfx.ir.joint import JointGraph, is_tensor, joint_graph
from streamfx.options import Options
from streamfx.passes import pipeline
from streamfx.passes.analysis.axes import axes_of
from streamfx.passes.analysis.derived_axes import find_derived_axes
from streamfx.passes.rewrite.canonicalize import record_draws
from streamfx.runtime.outer import HostProgramRunner


@dataclass(frozen=True)
class Call:
    """One operator and its arguments. `random` results are compared by shape only."""

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    random: bool = False

    def results(self) -> tuple[Tensor, ...]:
        made = self.target(*self.args, **self.kwargs)
        made = tuple(made) if isinstance(made, (tuple, list)) else (made,)
        return tuple(item for item in made if isinstance(item, Tensor))  # None: a gradient that was not requested


@dataclass(frozen=True)
class Traced:
    """A call as a joint graph without a backward half, and the tensors that go in and come out."""

    facts: Facts
    node: fx.Node
    inputs: tuple[Tensor, ...]
    results: tuple[Tensor, ...]

    @property
    def axes(self) -> AxisFacts:
        return self.facts.axes


def traced(call: Call) -> Traced:
    graph = fx.Graph()
    inputs: list[Tensor] = []

    def placeholder(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        node = graph.placeholder(f"primals_{len(inputs) + 1}")
        node.meta["val"] = item
        inputs.append(item)
        return node

    args, kwargs = pytree.tree_map(placeholder, (call.args, dict(call.kwargs)))
    results = call.results()
    node = graph.call_function(call.target, args, kwargs)
    outputs: list[Any] = [node]
    if isinstance(made := call.target(*call.args, **call.kwargs), (tuple, list)):
        node.meta["val"] = tuple(made)
        outputs = []
        for i, item in enumerate(made):
            if not isinstance(item, Tensor):
                continue
            outputs.append(graph.call_function(operator.getitem, (node, i)))
            outputs[-1].meta["val"] = item
    else:
        node.meta["val"] = made
    graph.output(tuple(outputs))
    record_draws(graph)
    joint = joint_graph(graph, len(inputs), len(outputs))
    axes = replace(axes_of(joint), static=frozenset())  # else values that follow from integers run whole
    return Traced(Facts(joint, found_axes=axes), node, tuple(inputs), results)


def factors(one: Traced) -> list[AxisFactor]:
    """All axes that the call's operands and results have."""
    table = one.axes.table
    shapes = [*one.axes.shapes.values(), *one.axes.results[one.node]]
    return sorted({factor for shape in shapes for dim in shape for factor in table.resolve(dim)})


def is_whole(one: Traced, factor: AxisFactor) -> bool:
    """Whether the rule needs all rows of an axis, or of a slice of it."""
    signature, labels = one.axes.signatures[one.node], one.axes.labels[one.node]
    with_factor = {label for label, dim in labels.items() if factor in one.axes.table.resolve(dim)}
    shifted = {window.source for label, window in signature.windows.items() if label in with_factor}
    return bool((with_factor | shifted) & signature.full_labels)


def streamed(one: Traced, factor: AxisFactor, chunk_size: int) -> tuple[list[Tensor], tuple[StorageClass, ...]]:
    """Return the results of the call, computed in chunks along an axis, and their storage classes."""
    axes = one.axes
    sequence = SequenceAxis(factor, axes.table.size(factor), *find_derived_axes(factor, axes))
    facts = replace(one.facts, found_axes=replace(axes, sequence=sequence))
    for step in pipeline(Options(chunk_size=chunk_size, loss_chunk_size=chunk_size, outputs="dense")):
        if step.name not in ("canonicalize", "recurrences", "axes"):
            facts = step.apply(facts)
    assert facts.program is not None
    for loop in facts.program.loops:
        loop.body.forward = OfSameRank(loop.body, one.facts.joint).run  # type: ignore[method-assign]
    results = HostProgramRunner(facts.program.forward)([item.clone() for item in one.inputs])
    return list(results), facts.access.storage_classes[one.node]


class OfSameRank(fx.Interpreter):
    """A body each value of which has as many dimensions as the value that it is a part of."""

    def __init__(self, body: fx.GraphModule, joint: JointGraph) -> None:
        super().__init__(body)
        self.ranks = {node.name: node.meta["val"].dim() for node in joint.nodes if is_tensor(node)}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor) and (rank := self.ranks.get(n.meta.get("joint", ""))) is not None:
            assert value.dim() == rank, f"{n.format_node()} makes {tuple(value.shape)} of a chunk, of {rank} dimensions"
        return value


def check(call: Call, chunk_size: int) -> Iterator[str]:
    """Hold a call to the law along every axis; yields the axes that streamed."""
    one = traced(call)
    assert one.node in one.axes.signatures, f"the rule declines: {one.axes.missing_rules.get(one.node)}"
    is_cut = bool(one.axes.signatures[one.node].windows)  # a slice has no rows to give where the longer one is no sequence
    for factor in factors(one):
        made, forms = streamed(one, factor, chunk_size)
        where = f"{call.target} along axis {factor} in chunks of {chunk_size}"
        runs_whole = all(form in (StorageClass.OUTSIDE, StorageClass.WHOLE) for form in forms)
        assert not runs_whole or is_whole(one, factor) or not one.inputs or is_cut, f"{where} ran whole"
        for actual, truth in zip(made, one.results, strict=True):
            assert_same(actual, truth, where, call.random)
        if not runs_whole:
            yield where


def assert_same(actual: Tensor, truth: Tensor, where: str, random: bool) -> None:
    assert actual.shape == truth.shape, f"{where}: shape {tuple(actual.shape)} instead of {tuple(truth.shape)}"
    assert actual.dtype == truth.dtype, f"{where}: {actual.dtype} instead of {truth.dtype}"
    if not random:
        torch.testing.assert_close(actual, truth, rtol=1e-12, atol=1e-13, equal_nan=True, msg=lambda text: f"{where}\n{text}")
