"""Match the unrolled tree of PyTorch's `associative_scan` in a Dynamo graph, and replace it by one operator.

    before   a = slice(x, 0, -1, 2);  b = slice(x, 1, None, 2);  pairs = vmap(combine)(a, b)
             pairs of pairs, ... and back: slice, vmap(combine), cat, stack, flatten, for each level
    after    rows = streamfx.associative_scan([x], [], number of combine)

Every operator of every level has to match, with one combine function of single rows. This fixes which rows are
combined, and in which order, so a chunk can do the same. The function need not be associative.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from streamfx.frontend.combine_fn import EXAMPLE, Body, combine_of, is_plain
from streamfx.ir.sizes import shape_of
from streamfx.runtime.associative import TREE_SCAN
from streamfx.torch_private import ENTER_AUTOCAST, EXIT_AUTOCAST, dynamo_copy
from streamfx.torch_private.vmapped import ADD_BATCH, ENTER_VMAP, LEAVE_VMAP, LOAD, PAD, REMOVE_BATCH, SLICE

OUTERMOST = 1  # the level of a `vmap` that is not nested in another transformation


class NoTreeError(Exception):
    """Raised if the operators are not such a tree, or its function does not take single rows."""


@dataclass
class Tree:
    """The operators of a matched tree, with the rows of each leaf before and after the scan."""

    elements: list[fx.Node]
    results: list[fx.Node]
    own: list[fx.Node]
    body: Body


def with_trees(module: fx.GraphModule) -> fx.GraphModule:
    """Return a Dynamo graph with one operator in place of each tree; the graph itself if it has none."""
    inner = {name: with_trees(part) for name, part in module.named_children() if isinstance(part, fx.GraphModule)}
    changed = {name: part for name, part in inner.items() if part is not getattr(module, name)}
    trees = _trees(module.graph)
    written = [(tree, number) for tree in trees if (number := combine_of(tree.body, tree.elements)) is not None]
    if not written and not changed:
        return module
    copy, copies = dynamo_copy(module)
    for tree, number in written:
        _write(tree, number, copies)
    for name, part in changed.items():
        setattr(copy, name, part)
    copy.recompile()
    return copy


def _trees(graph: fx.Graph) -> list[Tree]:
    """Return the maximal trees: each level of a tree is itself a tree of the level below."""
    trees, inside = list[Tree](), set[fx.Node]()
    for node in graph.nodes:
        if node not in inside and (tree := _tree_at(node)) is not None:
            trees.append(tree)
            inside.update(tree.own)
    return trees


def _write(tree: Tree, number: int, copies: dict[fx.Node, fx.Node]) -> None:
    graph, place = copies[tree.own[0]].graph, copies[tree.own[0]]
    elements = [copies[node] for node in tree.elements]
    given = [copies[node] for node in tree.body.given]
    with graph.inserting_before(copies[tree.own[-1]]):
        scan = graph.call_function(TREE_SCAN, (elements, given, number))
        results = [graph.call_function(operator.getitem, (scan, place)) for place in range(len(elements))]
    scan.meta = {**place.meta, EXAMPLE: [node.meta[EXAMPLE] for node in tree.results]}
    for result, node in zip(results, tree.results, strict=True):
        result.meta = {**place.meta, EXAMPLE: node.meta[EXAMPLE]}
        copies[node].replace_all_uses_with(result, propagate_meta=False)
    for node in reversed(tree.own):
        graph.erase_node(copies[node])


def _tree_at(node: fx.Node) -> Tree | None:
    """Return the tree whose first operator is this node."""
    if node.target is not SLICE or node.args[1:] != (0, 0, -1, 2) or _is_under_autocast(node):
        return None
    try:
        return _Reader(node).tree()
    except NoTreeError:
        return None


def _is_under_autocast(node: fx.Node) -> bool:
    """Return whether the graph itself enables autocast at this node; the trace shows autocast around it."""
    entered = 0
    for each in node.graph.nodes:
        entered += (each.target is ENTER_AUTOCAST) - (each.target is EXIT_AUTOCAST)
        if each is node:
            break
    return entered != 0


class _Reader:
    """Matches operators in the order in which `generic_associative_scan` calls them, in PyTorch 2.11 to 2.13."""

    def __init__(self, first: fx.Node) -> None:
        self.at, self.own, self.sizes = first, list[fx.Node](), list[fx.Node]()
        self.body: Body | None = None

    def tree(self) -> Tree:
        elements = self._elements()
        results = self._scan(elements)
        own = set(self.own)
        for size in reversed(self.sizes):
            if own.issuperset(size.users):
                own.add(size)
        if self.body is None or any(user not in own for node in own.difference(results) for user in node.users):
            raise NoTreeError
        return Tree(elements, results, [node for node in elements[0].graph.nodes if node in own], self.body)

    def _elements(self) -> list[fx.Node]:
        """Return the operands of the first slices."""
        elements, node = list[fx.Node](), self.at
        while node.target is SLICE and node.args[1:] == (0, 0, -1, 2):
            elements.append(node.args[0])  # type: ignore[arg-type]
            node = node.next
        counts = {_count(node) for node in elements}
        if (
            len(counts) != 1
            or min(counts) < 2
            or not all(map(is_plain, elements))
            or any(0 in shape_of(node.meta[EXAMPLE]) for node in elements)
        ):
            raise NoTreeError
        return elements

    def _scan(self, rows: list[fx.Node]) -> list[fx.Node]:
        count = _count(rows[0])
        if count < 2:
            return rows
        halves = [*self._slices(rows, 0, -1, 2), *self._slices(rows, 1, None, 2)]
        odds = self._scan(self._combined(halves, rows, count // 2))
        left = self._slices(odds, 0, -1) if count % 2 == 0 else odds
        evens = self._combined([*left, *self._slices(rows, 2, None, 2)], rows, (count - 1) // 2)
        with_first = [self._with_first(*both, is_alone=count == 2) for both in zip(rows, evens, strict=True)]
        return [self._interleaved(*both) for both in zip(with_first, odds, strict=True)]

    def _slices(self, values: Sequence[fx.Node], *bounds: Any) -> list[fx.Node]:
        return [self._take(SLICE, value, 0, *bounds) for value in values]

    def _with_first(self, row: fx.Node, rest: fx.Node, is_alone: bool) -> fx.Node:
        first = self._take(SLICE, row, 0, 0, 1)
        return first if is_alone else self._take(torch.cat, [first, rest], dim=0)

    def _interleaved(self, one: fx.Node, other: fx.Node) -> fx.Node:
        count, more = _count(one), _count(one) != _count(other)
        if more:
            before = 2 * (one.meta[EXAMPLE].dim() - 1) + 1
            other = self._take(PAD, other, [*(0 for _ in range(before)), 1], "constant", None)
        both = self._take(torch.stack, [one, other], dim=1)
        flat = self._take(torch.flatten, both, start_dim=0, end_dim=1)
        return self._take(SLICE, flat, 0, 0, 2 * count - 1) if more else flat

    def _combined(self, operands: Sequence[fx.Node], like: Sequence[fx.Node], count: int) -> list[fx.Node]:
        """Match one application of the combine function, which must be the same on every level."""
        self._take(LOAD)
        self._take(ENTER_VMAP, count, "error")
        rows = [self._take(ADD_BATCH, operand, 0, OUTERMOST) for operand in operands]
        inside = list[fx.Node]()
        while self.at.target is not REMOVE_BATCH:
            inside.append(self._next(self.at.op in ("call_function", "call_method")))
        ends = _row_of(self.at, len(like))
        body = Body.read(rows, inside, [end.args[0] for end in ends])
        results = [self._take(REMOVE_BATCH, end.args[0], OUTERMOST, count, 0) for end in ends]
        self._take(LEAVE_VMAP)
        if body is None or (self.body is not None and self.body != body):
            raise NoTreeError
        self.body = body
        if any(_kind(node) != _kind(row) or _count(node) != count for node, row in zip(results, like, strict=True)):
            raise NoTreeError
        return results

    def _take(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        self._pass_sizes()
        return self._next(self.at.target is target and _with_numbers(self.at.args) == args and self.at.kwargs == kwargs)

    def _pass_sizes(self) -> None:
        """Skip operators on sizes, which are interspersed if a length is symbolic."""
        while isinstance(self.at.meta.get(EXAMPLE), torch.SymInt):
            self.sizes.append(self.at)
            self.at = self.at.next

    def _next(self, is_it: bool) -> fx.Node:
        if not is_it:
            raise NoTreeError
        node, self.at = self.at, self.at.next
        self.own.append(node)
        return node


def _row_of(node: fx.Node, count: int) -> list[fx.Node]:
    """Return this many consecutive operators, starting at this one."""
    nodes = [node]
    while len(nodes) < count:
        nodes.append(nodes[-1].next)
    return nodes


def _count(node: Any) -> int:
    """Return the number of rows of a value. Tracing specializes it, since the tree depends on it."""
    value = node.meta.get(EXAMPLE) if isinstance(node, fx.Node) else None
    if not isinstance(value, Tensor) or not value.dim():
        raise NoTreeError
    return int(value.shape[0])


def _kind(node: fx.Node) -> Any:
    value = node.meta[EXAMPLE]
    return shape_of(value)[1:], value.dtype, value.device


def _with_numbers(arguments: Any) -> Any:
    """Return the arguments with symbolic sizes replaced by numbers."""
    return fx.node.map_arg(
        arguments, lambda node: int(value) if isinstance(value := node.meta.get(EXAMPLE), torch.SymInt) else node
    )
