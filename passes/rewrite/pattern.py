"""Rewrite rules of canonicalization: one operator with its neighbors, and an equal graph that replaces it.

A rule is a function (node, writer) with the decorator `rewrite_rule(operators)`. It starts from one operator, checks the
operators around it, and inserts the replacement with the writer. The replacement computes the same values; it may round
differently if the rule's docstring says so.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import fx

from streamfx.ir.joint import int_argument
from streamfx.ir.writer import GraphWriter
from streamfx.node_meta import VALUE

Replacement: TypeAlias = "fx.Node | Mapping[fx.Node, fx.Node] | None"


@dataclass(frozen=True)
class RewriteRule:
    """A rewrite rule: `rewrite` is called for each node whose operator is among `targets`.

    `targets` are operators, or names of operators that other packages define (the collection may grow later). `rewrite`
    gets the node, and a writer that inserts nodes before it. It returns the replacement of the node, a mapping from old to
    new nodes if it replaces several values, or None if the rule does not apply. It replaces nothing itself.
    """

    name: str
    targets: Collection[Any]
    rewrite: Callable[[fx.Node, GraphWriter], Replacement]

    @property
    def text(self) -> str:
        """The rule's docstring, which says `before -> after`."""
        return inspect.getdoc(self.rewrite) or ""


def emit_getitems(node: fx.Node, other: fx.Node, writer: GraphWriter) -> dict[fx.Node, fx.Node]:
    """Emit a `getitem` of the operator `other` for each `getitem` of `node`, with the same index; return {old: new}.

    A `getitem` beyond the results of `other` has no replacement. All users of `node` are `getitem` nodes.
    """
    num_results = len(other.meta[VALUE])
    return {item: writer.call(operator.getitem, other, item.args[1]) for item in node.users if item.args[1] < num_results}  # type: ignore[operator]


def getitems_by_index(node: fx.Node) -> dict[int, list[fx.Node]] | None:
    """Return the `getitem` nodes of an operator with several results, by result index; None if it has any other user."""
    getitems: dict[int, list[fx.Node]] = {}
    for user in node.users:
        if user.target is not operator.getitem:
            return None
        getitems.setdefault(int_argument(user, 1), []).append(user)
    return getitems


def rewrite_rule(*targets: Any) -> Callable[[Callable[[fx.Node, GraphWriter], Replacement]], RewriteRule]:
    """Return a decorator that turns a function into a rewrite rule for the operators `targets`."""
    return lambda rewrite: RewriteRule(rewrite.__name__, targets, rewrite)
