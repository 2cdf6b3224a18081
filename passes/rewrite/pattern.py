"""A row of canonicalization: an equation between graphs, and where it may hold.

What stands on the left is found from one operator of it, and proven by looking at the operators around that one. What stands on
the right computes the same, to rounding where its docstring says so.
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

Equals: TypeAlias = "fx.Node | Mapping[fx.Node, fx.Node] | None"


@dataclass(frozen=True)
class Equation:
    """`rewrite` gets an operator among `targets` (names of those that other packages define; there may be more of them later),
    and a writer that stands before it.

    It gives what the operator equals, or what each of several values equals where they change together; None where the equation
    does not hold, or says nothing new. It replaces nothing itself.
    """

    name: str
    targets: Collection[Any]
    rewrite: Callable[[fx.Node, GraphWriter], Equals]

    @property
    def text(self) -> str:
        """The equation in words: before -> after."""
        return inspect.getdoc(self.rewrite) or ""


def results_of_another(node: fx.Node, other: fx.Node, writer: GraphWriter) -> dict[fx.Node, fx.Node]:
    """For each result of an operator that is taken out of it: the same result of another one."""
    count = len(other.meta[VALUE])
    return {part: writer.call(operator.getitem, other, part.args[1]) for part in node.users if part.args[1] < count}  # type: ignore[operator]


def results_in_use(node: fx.Node) -> dict[int, list[fx.Node]] | None:
    """The nodes that take each result out of an operator with several, by position; None where anything else uses it."""
    parts: dict[int, list[fx.Node]] = {}
    for user in node.users:
        if user.target is not operator.getitem:
            return None
        parts.setdefault(int_argument(user, 1), []).append(user)
    return parts


def equation(*targets: Any) -> Callable[[Callable[[fx.Node, GraphWriter], Equals]], Equation]:
    """Make a row of a function, to be tried on each operator among `targets`."""
    return lambda rewrite: Equation(rewrite.__name__.replace("_", " "), targets, rewrite)
