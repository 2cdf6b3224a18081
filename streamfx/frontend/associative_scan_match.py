"""Match the unrolled tree of PyTorch's `associative_scan` in a Dynamo graph, and replace it by one operator.

Dynamo traces a scan over the rows (dimension 0) of x as a *tree*: it combines pairs of neighboring rows, scans the results, which
are half as many (the next *level*), and combines them with the rows between.

    before   a = slice(x, 0, -1, 2);  b = slice(x, 1, None, 2);  pairs = vmap(combine)(a, b)
             pairs of pairs, ... and back: slice, vmap(combine), cat, stack, flatten, for each level
    after    rows = streamfx.associative_scan([x], [], identifier of combine)

If the state has several tensors, there is one operand (*element*) and one result for each. Every operator of every level has to
match, with one combine function of single rows. This fixes which rows are combined, and in which order, so a chunk can do the
same. The function need not be associative.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from streamfx.dialect.associative_scan import TREE_SCAN
from streamfx.frontend.combine_fn import CombineBody, is_plain_tensor, register_combine
from streamfx.ir.sizes import shape_of
from streamfx.node_meta import EXAMPLE_VALUE
from streamfx.torch_private import ENTER_AUTOCAST, EXIT_AUTOCAST, dynamo_copy
from streamfx.torch_private.vmapped import ADD_BATCH, ENTER_VMAP, LEAVE_VMAP, LOAD, PAD, REMOVE_BATCH, SLICE

OUTERMOST = 1  # the level of a `vmap` that is not nested in another transformation


class NoScanTreeError(Exception):
    """Raised if operators are not the tree of an associative scan, or its function does not take single rows."""


@dataclass
class Tree:
    """A matched tree: its operands and results (one for each tensor of the state), its operators, and its combine function."""

    elements: list[fx.Node]
    results: list[fx.Node]
    matched: list[fx.Node]
    body: CombineBody


def replace_scan_trees(module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a Dynamo graph, nested graphs included, with one operator in place of each scan tree.

    Return the module itself if it has no tree. A tree whose combine function has side effects stays as it is.
    """
    submodules = {
        name: replace_scan_trees(submodule)
        for name, submodule in module.named_children()
        if isinstance(submodule, fx.GraphModule)
    }
    changed = {name: submodule for name, submodule in submodules.items() if submodule is not getattr(module, name)}
    trees = _find_trees(module.graph)
    trees_with_ids = [
        (tree, combine_id) for tree in trees if (combine_id := register_combine(tree.body, tree.elements)) is not None
    ]
    if not trees_with_ids and not changed:
        return module
    copy, copies = dynamo_copy(module)
    for tree, combine_id in trees_with_ids:
        _replace_tree(tree, combine_id, copies)
    for name, submodule in changed.items():
        setattr(copy, name, submodule)
    copy.recompile()
    return copy


def _find_trees(graph: fx.Graph) -> list[Tree]:
    """Return the scan trees of a graph. An inner level of a tree, which is itself a tree of half the rows, is not returned."""
    trees, covered = list[Tree](), set[fx.Node]()
    for node in graph.nodes:
        if node not in covered and (tree := _match_tree(node)) is not None:
            trees.append(tree)
            covered.update(tree.matched)
    return trees


def _replace_tree(tree: Tree, combine_id: int, copies: dict[fx.Node, fx.Node]) -> None:
    """Insert one scan operator before the tree's last operator, use its results in place of the tree's, and erase the tree.

    The tree's nodes are of the original graph; `copies` maps them to the nodes of the graph that is changed. `combine_id`
    identifies the registered combine function.
    """
    graph, first_operator = copies[tree.matched[0]].graph, copies[tree.matched[0]]
    elements = [copies[node] for node in tree.elements]
    shared = [copies[node] for node in tree.body.outer_tensors]
    with graph.inserting_before(copies[tree.matched[-1]]):
        scan = graph.call_function(TREE_SCAN, (elements, shared, combine_id))
        results = [graph.call_function(operator.getitem, (scan, index)) for index in range(len(elements))]
    scan.meta = {**first_operator.meta, EXAMPLE_VALUE: [node.meta[EXAMPLE_VALUE] for node in tree.results]}
    for result, node in zip(results, tree.results, strict=True):
        result.meta = {**first_operator.meta, EXAMPLE_VALUE: node.meta[EXAMPLE_VALUE]}
        copies[node].replace_all_uses_with(result, propagate_meta=False)
    for node in reversed(tree.matched):
        graph.erase_node(copies[node])


def _match_tree(node: fx.Node) -> Tree | None:
    """Return the scan tree whose first operator is this node, the slice x[0:-1:2] of even rows; None if no tree begins here."""
    dim_start_stop_step = node.args[1:]
    if node.target is not SLICE or dim_start_stop_step != (0, 0, -1, 2) or _is_under_autocast(node):
        return None
    try:
        return _TreeReader(node).tree()
    except NoScanTreeError:
        return None


def _is_under_autocast(node: fx.Node) -> bool:
    """Return whether a node is inside an autocast region that the graph itself enters.

    Such a tree is not matched, because its combine function is traced again without autocast.
    """
    depth = 0
    for other in node.graph.nodes:
        depth += (other.target is ENTER_AUTOCAST) - (other.target is EXIT_AUTOCAST)
        if other is node:
            break
    return depth != 0


class _TreeReader:
    """Matches operators in the order in which `generic_associative_scan` calls them, in PyTorch 2.11 to 2.13."""

    def __init__(self, first_slice: fx.Node) -> None:
        """Begin at the first slice of a tree."""
        self.current = first_slice  # the next operator to match
        self.matched = list[fx.Node]()
        self.size_operators = list[fx.Node]()  # operators on symbolic sizes, between the matched ones
        self.body: CombineBody | None = None  # the combine function, once it is read at the first level

    def tree(self) -> Tree:
        """Match all operators of the tree, and return it.

        Raise `NoScanTreeError` if an operator does not match, or if operators outside the tree use its inner values.
        """
        elements = self._first_operands()
        results = self._match_scan(elements)
        matched = set(self.matched)
        for size in reversed(self.size_operators):
            if matched.issuperset(size.users):  # nothing outside the tree uses this size
                matched.add(size)
        if self.body is None or any(user not in matched for node in matched.difference(results) for user in node.users):
            raise NoScanTreeError
        return Tree(elements, results, [node for node in elements[0].graph.nodes if node in matched], self.body)

    def _first_operands(self) -> list[fx.Node]:
        """Return the scanned tensors (elements): the operands of the slices x[0:-1:2] with which the tree begins.

        Raise `NoScanTreeError` unless they are plain, nonempty tensors with equally many rows, two or more.
        """
        elements, node = list[fx.Node](), self.current
        while node.target is SLICE and node.args[1:] == (0, 0, -1, 2):
            elements.append(node.args[0])  # type: ignore[arg-type]
            node = node.next
        counts = {_num_rows(node) for node in elements}
        if (
            len(counts) != 1
            or min(counts) < 2
            or not all(map(is_plain_tensor, elements))
            or any(0 in shape_of(node.meta[EXAMPLE_VALUE]) for node in elements)
        ):
            raise NoScanTreeError
        return elements

    def _match_scan(self, rows: list[fx.Node]) -> list[fx.Node]:
        """Match the scan of the rows at one level, recursively, and return its results, one node for each tensor of the state.

        For rows a b c d, the level below scans the pairs ab, cd to ab, abcd: the odd results. An even result is the odd result
        before it, combined with its own row (ab and c give abc); the first one is the row a. Interleaved: a, ab, abc, abcd.
        """
        num_rows = _num_rows(rows[0])
        if num_rows < 2:
            return rows
        left_and_right = [*self._match_slices(rows, 0, -1, 2), *self._match_slices(rows, 1, None, 2)]
        odds = self._match_scan(self._match_combine(left_and_right, rows, num_rows // 2))
        odds_before = self._match_slices(odds, 0, -1) if num_rows % 2 == 0 else odds
        evens = self._match_combine([*odds_before, *self._match_slices(rows, 2, None, 2)], rows, (num_rows - 1) // 2)
        with_first = [self._match_first_row(*pair, is_only_row=num_rows == 2) for pair in zip(rows, evens, strict=True)]
        return [self._match_interleave(*pair) for pair in zip(with_first, odds, strict=True)]

    def _match_slices(self, values: Sequence[fx.Node], *bounds: Any) -> list[fx.Node]:
        """Match the slice [start:stop:step] of the rows of each value (`bounds`: start, stop, step), and return the slices."""
        return [self._expect(SLICE, value, 0, *bounds) for value in values]

    def _match_first_row(self, rows: fx.Node, rest: fx.Node, is_only_row: bool) -> fx.Node:
        """Match `cat([rows[0:1], rest])`, or only the slice `rows[0:1]` if it is the only row; return the result."""
        first_row = self._expect(SLICE, rows, 0, 0, 1)
        return first_row if is_only_row else self._expect(torch.cat, [first_row, rest], dim=0)

    def _match_interleave(self, leading: fx.Node, following: fx.Node) -> fx.Node:
        """Match the interleaving of the rows of two values (stack, then flatten), and return its result.

        If `leading` has one row more, `following` is padded by one row at the end, and that row of the result is sliced off.
        """
        num_rows = _num_rows(leading)
        is_longer = num_rows != _num_rows(following)
        if is_longer:
            # `pad` takes (before, after) for each dimension, the last dimension first: the last entry is the end of the rows
            zeros_before = 2 * (leading.meta[EXAMPLE_VALUE].dim() - 1) + 1
            following = self._expect(PAD, following, [*(0 for _ in range(zeros_before)), 1], "constant", None)
        stacked = self._expect(torch.stack, [leading, following], dim=1)
        flat = self._expect(torch.flatten, stacked, start_dim=0, end_dim=1)
        return self._expect(SLICE, flat, 0, 0, 2 * num_rows - 1) if is_longer else flat

    def _match_combine(self, operands: Sequence[fx.Node], state_rows: Sequence[fx.Node], num_pairs: int) -> list[fx.Node]:
        """Match `vmap(combine)` of `num_pairs` pairs of rows, and return its results, one for each tensor of the state.

        `operands` are the left rows of each tensor, then the right rows. The function must be the same on every level, and its
        results must have the row shapes and dtypes of `state_rows`; otherwise raise `NoScanTreeError`.
        """
        self._expect(LOAD)
        self._expect(ENTER_VMAP, num_pairs, "error")
        rows = [self._expect(ADD_BATCH, operand, 0, OUTERMOST) for operand in operands]
        body_nodes = list[fx.Node]()
        while self.current.target is not REMOVE_BATCH:
            body_nodes.append(self._next(self.current.op in ("call_function", "call_method")))
        ends = _consecutive(self.current, len(state_rows))
        body = CombineBody.read(rows, body_nodes, [end.args[0] for end in ends])
        results = [self._expect(REMOVE_BATCH, end.args[0], OUTERMOST, num_pairs, 0) for end in ends]
        self._expect(LEAVE_VMAP)
        if body is None or (self.body is not None and self.body != body):
            raise NoScanTreeError
        self.body = body
        if any(
            _row_type(node) != _row_type(row) or _num_rows(node) != num_pairs
            for node, row in zip(results, state_rows, strict=True)
        ):
            raise NoScanTreeError
        return results

    def _expect(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Return the next operator if it is a call of `target` with these arguments; otherwise raise `NoScanTreeError`.

        Operators on symbolic sizes before it are skipped, and symbolic sizes among its arguments count as integers.
        """
        self._skip_size_operators()
        return self._next(
            self.current.target is target and _with_int_sizes(self.current.args) == args and self.current.kwargs == kwargs
        )

    def _skip_size_operators(self) -> None:
        """Advance to the next operator that computes no size. Dynamo's graph computes sizes if a length is symbolic."""
        while isinstance(self.current.meta.get(EXAMPLE_VALUE), torch.SymInt):
            self.size_operators.append(self.current)
            self.current = self.current.next

    def _next(self, is_expected: bool) -> fx.Node:
        """Record the current operator as matched, advance, and return it; raise `NoScanTreeError` if not `is_expected`."""
        if not is_expected:
            raise NoScanTreeError
        node, self.current = self.current, self.current.next
        self.matched.append(node)
        return node


def _consecutive(node: fx.Node, count: int) -> list[fx.Node]:
    """Return `count` consecutive operators of a graph, starting at this one."""
    nodes = [node]
    while len(nodes) < count:
        nodes.append(nodes[-1].next)
    return nodes


def _num_rows(node: Any) -> int:
    """Return the number of rows (dimension 0) of a node's tensor as an integer, which specializes a symbolic size.

    Raise `NoScanTreeError` if the node has no tensor, or a tensor without dimensions.
    """
    value = node.meta.get(EXAMPLE_VALUE) if isinstance(node, fx.Node) else None
    if not isinstance(value, Tensor) or not value.dim():
        raise NoScanTreeError
    return int(value.shape[0])


def _row_type(node: fx.Node) -> Any:
    """Return shape, dtype and device of one row of a node's tensor, which drops dimension 0."""
    value = node.meta[EXAMPLE_VALUE]
    return shape_of(value)[1:], value.dtype, value.device


def _with_int_sizes(arguments: Any) -> Any:
    """Return a call's arguments with each node of a symbolic size replaced by its integer; other nodes stay."""
    return fx.node.map_arg(
        arguments, lambda node: int(value) if isinstance(value := node.meta.get(EXAMPLE_VALUE), torch.SymInt) else node
    )
