"""Rewrite rules of canonicalization: one operator with its neighbors, and an equal graph that replaces it.

A rule starts from one operator and checks the operators around it. The replacement computes the same values; it may round
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
    """A rewrite rule: `rewrite` gets a node whose operator is among `targets`, and a writer placed before this node.

    `targets` are operators, or names of operators that other packages define (the collection may grow later). `rewrite`
    returns the replacement of the node, a mapping if several values are replaced together, or None if the rule does not
    apply or changes nothing. It replaces nothing itself.
    """

    name: str
    targets: Collection[Any]
    rewrite: Callable[[fx.Node, GraphWriter], Replacement]

    @property
    def text(self) -> str:
        """The rule as text: before -> after."""
        return inspect.getdoc(self.rewrite) or ""


def results_of_another(node: fx.Node, other: fx.Node, writer: GraphWriter) -> dict[fx.Node, fx.Node]:
    """Map each `getitem` of an operator to a new `getitem` at the same position of another operator."""
    count = len(other.meta[VALUE])
    return {item: writer.call(operator.getitem, other, item.args[1]) for item in node.users if item.args[1] < count}  # type: ignore[operator]


def results_in_use(node: fx.Node) -> dict[int, list[fx.Node]] | None:
    """Return the `getitem` nodes of an operator with several results, by position; None if it has any other user."""
    getitems: dict[int, list[fx.Node]] = {}
    for user in node.users:
        if user.target is not operator.getitem:
            return None
        getitems.setdefault(int_argument(user, 1), []).append(user)
    return getitems


def rewrite_rule(*targets: Any) -> Callable[[Callable[[fx.Node, GraphWriter], Replacement]], RewriteRule]:
    """Make a rewrite rule of a function, which is tried on each operator among `targets`."""
    return lambda rewrite: RewriteRule(rewrite.__name__, targets, rewrite)
