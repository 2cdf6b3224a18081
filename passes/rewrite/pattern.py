"""Rewrite rules of canonicalization: a pattern of operators, and an equal graph that replaces it.

A rule is a function (node, writer, captures) with the decorator `rewrite_rule(pattern)`. It inserts the replacement with the
writer. The replacement computes the same values; it may round differently if the rule's docstring says so.

A pattern is written like the calls that it matches. Strings capture arguments, and `...` matches any argument:

    @rewrite_rule(op(aten.flip.default, op(aten.flip.default, "x", "dims"), "dims"))
    def remove_double_flip(node, writer, x, dims): ...

A name that occurs twice must be the same value both times. An argument that is not written must have its default, so
`op(aten.add.Tensor, "x", "y")` only matches additions without a factor `alpha`; `REST` matches all other arguments.
Dimensions are compared and captured as nonnegative numbers. Conditions on captures that a pattern cannot express are code in
the rule, which then returns None.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any, TypeAlias

import torch
from torch import fx

from streamfx.ir.joint import bound_arguments, int_argument, is_tensor, schema_arguments, shape_of_node
from streamfx.ir.writer import GraphWriter
from streamfx.node_meta import VALUE

aten = torch.ops.aten
Replacement: TypeAlias = "fx.Node | Mapping[fx.Node, fx.Node] | None"
Rewrite: TypeAlias = "Callable[..., Replacement]"
Captures: TypeAlias = "Mapping[str, Any]"
COMMUTATIVE = {aten.add.Tensor, aten.mul.Tensor, aten.eq.Tensor}
REST = object()  # as the last argument of a pattern: all arguments that are not written may have any value
DIMENSIONS = {"dim", "dim0", "dim1", "dims", "dimension"}  # names of arguments that are dimensions, or lists of them


# -- rules


@dataclass(frozen=True)
class RewriteRule:
    """A rewrite rule: `rewrite` is called for each node whose operator is among `targets`.

    `targets` are operators, or names of operators that other packages define (the collection may grow later). `rewrite`
    gets the node, and a writer that inserts nodes before it. It returns the replacement of the node, a mapping from old to
    new nodes if it replaces several values, or None if the rule does not apply. It replaces nothing itself.
    `may_match` returns False, quickly, for most nodes to which the rule does not apply.
    """

    name: str
    targets: Collection[Any]
    rewrite: Callable[[fx.Node, GraphWriter], Replacement]
    may_match: Callable[[fx.Node], bool] = lambda node: True

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


def readers_of(getitems: Mapping[int, Sequence[fx.Node]]) -> list[fx.Node]:
    """Return the users of all results but the first, in graph order: for attention, these must be its backward calls."""
    return sorted({user for index, items in getitems.items() if index for item in items for user in item.users})


def rewrite_rule(*patterns: Any) -> Callable[[Rewrite], RewriteRule]:
    """Return a decorator that turns a function into a rewrite rule for nodes that match one of the patterns.

    The function gets the node, the writer, and the captures that its parameters name, or all of them as `captures`. It is
    called for each way in which the node matches, until it returns a replacement. An operator in place of a pattern matches
    with any arguments.
    """
    roots = [pattern for pattern in patterns if isinstance(pattern, Op)]
    targets = [target for pattern in patterns for target in (pattern.targets if isinstance(pattern, Op) else (pattern,))]

    def decorator(function: Rewrite) -> RewriteRule:
        """Return the rule; its `rewrite` has the function's name and docstring."""
        names = inspect.signature(function).parameters

        @wraps(function)
        def rewrite(node: fx.Node, writer: GraphWriter) -> Replacement:
            """Match the node, and call the function with the captures."""
            for root in filter(lambda root: root.may_match(node), roots):
                for captures in root.matches(node, {}):
                    arguments = {**captures, "captures": captures}
                    replacement = function(node, writer, **{name: arguments[name] for name in arguments if name in names})
                    if replacement is not None:
                        return replacement
            return None

        if not roots:
            return RewriteRule(function.__name__, targets, function)
        may_match = roots[0].may_match if len(roots) == 1 else Either(tuple(roots)).may_match
        return RewriteRule(function.__name__, targets, rewrite, may_match)

    return decorator


# -- patterns


class Pattern:
    """Describes a value and the operators that compute it."""

    def matches(self, value: Any, captures: Captures) -> Iterator[Captures]:
        """Yield, for each way in which a value matches, the given captures with those of the pattern."""
        raise NotImplementedError

    def may_match(self, value: Any) -> bool:
        """Return False only if a value certainly does not match. This check is cheap: most values fail it."""
        return True

    def match(self, value: Any, captures: Captures | None = None) -> dict[str, Any] | None:
        """Return the captures of the first way in which a value matches, with the given captures; None if there is none."""
        return next((dict(match) for match in self.matches(value, captures or {})), None)


@dataclass(frozen=True)
class Op(Pattern):
    """A call of one of the operators `targets`, whose arguments match; `name` captures its node.

    Arguments that are not written must have their defaults, unless `has_rest`.
    """

    targets: Collection[Any]
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    name: str | None
    has_rest: bool

    def matches(self, value: Any, captures: Captures) -> Iterator[Captures]:
        """Yield the captures; the two operands of a commutative operator are also tried in the other order."""
        if not self.may_match(value):
            return
        traced = _traced_arguments(value)
        written = {**dict(zip(traced, self.arguments, strict=False)), **self.keywords}
        defaults = () if self.has_rest else schema_arguments(value.target)
        has_defaults = all(traced[name] == default for name, default, _ in defaults if name not in written)
        if len(self.arguments) > len(traced) or not has_defaults:
            return
        values = _with_nonnegative_dims(value, traced)
        orders = [[values.get(name) for name in written]]  # an argument that the operator does not have is None
        if value.target in COMMUTATIVE and len(written) == 2 and not self.has_rest:
            orders.append(orders[0][::-1])
        for bound in _match_one(... if self.name is None else self.name, value, captures):
            for order in orders:
                yield from _match_all([*written.values()], order, bound)

    @cached_property
    def _operand_patterns(self) -> list[tuple[int, Pattern]]:
        """The positions and patterns of arguments that are more than a name or a constant."""
        return [(i, item) for i, item in enumerate(self.arguments) if isinstance(item, Pattern)]

    def may_match(self, value: Any) -> bool:
        """Return False if a value is no such call, or if its operands certainly do not match."""
        if not isinstance(value, fx.Node) or value.target not in self.targets:
            return False
        args = value.args
        is_commutative = self._operand_patterns and value.target in COMMUTATIVE
        for i, pattern in self._operand_patterns:
            if not (any(map(pattern.may_match, args[:2])) if is_commutative else i >= len(args) or pattern.may_match(args[i])):
                return False
        return True


@dataclass(frozen=True)
class Either(Pattern):
    """One of several patterns, tried in order."""

    patterns: tuple[Any, ...]

    def matches(self, value: Any, captures: Captures) -> Iterator[Captures]:
        """Yield the captures of each pattern that matches."""
        for pattern in self.patterns:
            yield from _match_one(pattern, value, captures)

    def may_match(self, value: Any) -> bool:
        """Return whether one of the patterns may match."""
        return any(not isinstance(pattern, Pattern) or pattern.may_match(value) for pattern in self.patterns)


@dataclass(frozen=True)
class Through(Pattern):
    """A pattern of the value before all operators `skipped`, such as views or casts, with one operand each.

    If `keeps` is given, only operators are skipped for which it returns True.
    """

    skipped: Collection[Any]
    pattern: Any
    keeps: Callable[[fx.Node], bool] | None = None

    def matches(self, value: Any, captures: Captures) -> Iterator[Captures]:
        """Yield the captures of the pattern for the value before the skipped operators."""
        yield from _match_one(self.pattern, self.skip(value), captures)

    def may_match(self, value: Any) -> bool:
        """Return whether the value before the skipped operators may match."""
        return not isinstance(self.pattern, Pattern) or self.pattern.may_match(self.skip(value))

    def skip(self, value: Any) -> Any:
        """Return the value before the skipped operators."""
        while isinstance(value, fx.Node) and value.target in self.skipped and (self.keeps is None or self.keeps(value)):
            value = value.args[0]
        return value


@dataclass(frozen=True)
class Where(Pattern):
    """A pattern for values on which a condition holds."""

    condition: Callable[[Any], bool]
    pattern: Any

    def matches(self, value: Any, captures: Captures) -> Iterator[Captures]:
        """Yield the captures of the pattern, if the condition holds."""
        if self.condition(value):
            yield from _match_one(self.pattern, value, captures)


def op(targets: Any, *arguments: Any, name: str | None = None, **keywords: Any) -> Op:
    """Return a pattern of a call: the operator, or a collection of operators, and its arguments; `name` captures the node."""
    has_rest = bool(arguments) and arguments[-1] is REST
    targets = targets if isinstance(targets, (set, frozenset, tuple)) else (targets,)
    return Op(targets, arguments[:-1] if has_rest else arguments, keywords, name, has_rest)


def either(*patterns: Any) -> Either:
    """Return a pattern that matches if one of the patterns does."""
    return Either(patterns)


def tensor(pattern: Any) -> Where:
    """Return a pattern of a tensor, not of a number or None."""
    return Where(is_tensor, pattern)


def match_uses(name: str, value: fx.Node, roots: Mapping[str, Op | Either], captures: Captures) -> dict[str, Any] | None:
    """Match all uses of a value, and return the captures; None if the value has any other use.

    `roots` are patterns of the nodes to which the uses lead, and `name` is the capture of the value in them. The result has,
    by the key of each root, the list of nodes that match it, added to the list in `captures`. For a value p,

        match_uses("p", p, {"products": op(aten.bmm.default, op(aten.transpose.int, "p", 1, 2), "x")}, {})

    returns {"p": p, "x": x, "products": [bmm]} if nothing but transposes reads p, and nothing but products with x reads these.
    """
    captures = {**captures, name: value}
    ops = [item for root in roots.values() for item in (root.patterns if isinstance(root, Either) else (root,))]
    passed = _operators_in(argument for item in ops for argument in (*item.arguments, *item.keywords.values()))
    visited, todo = {value}, list(value.users)
    while todo:
        user = todo.pop(0)
        matches = ((key, match) for key, root in roots.items() if (match := root.match(user, captures)) is not None)
        if (found := next(matches, None)) is not None:
            key, match = found
            captures = {**match, key: [*captures.get(key, ()), user]}
        elif user.target in passed:
            visited.add(user)
            todo[:0] = user.users
        else:
            return None
    others = (capture for key, capture in captures.items() if key != name and isinstance(capture, fx.Node))
    return None if any(other in visited for other in others) else captures  # the value may be used in its own place only


def _operators_in(patterns: Iterable[Any]) -> set[Any]:
    """Return the operators in patterns, at any depth."""
    operators = set[Any]()
    for pattern in patterns:
        match pattern:
            case Op():
                operators |= {*pattern.targets} | _operators_in((*pattern.arguments, *pattern.keywords.values()))
            case Either():
                operators |= _operators_in(pattern.patterns)
            case Through():
                operators |= {*pattern.skipped} | _operators_in((pattern.pattern,))
            case Where():
                operators |= _operators_in((pattern.pattern,))
    return operators


def _match_one(pattern: Any, value: Any, captures: Captures) -> Iterator[Captures]:
    """Yield the captures for each way in which an argument matches its pattern: `...`, a name, a `Pattern`, list or constant."""
    if isinstance(pattern, Pattern):
        yield from pattern.matches(value, captures)
    elif isinstance(pattern, list):
        if isinstance(value, (list, tuple)) and len(value) == len(pattern):
            yield from _match_all(pattern, value, captures)
    elif isinstance(pattern, str) and pattern not in captures:
        yield {**captures, pattern: value}
    elif pattern is ... or _is_same(captures[pattern] if isinstance(pattern, str) else pattern, value):
        yield captures


def _match_all(patterns: Sequence[Any], values: Sequence[Any], captures: Captures) -> Iterator[Captures]:
    """Yield the captures for each way in which all values match their patterns."""
    if not patterns:
        yield captures
        return
    for extended in _match_one(patterns[0], values[0], captures):
        yield from _match_all(patterns[1:], values[1:], extended)


def _is_same(expected: Any, value: Any) -> bool:
    """Return whether two arguments are one node, or equal constants; 1 and 1.0 are equal, but not 1 and True."""
    if isinstance(expected, (list, tuple)) and isinstance(value, (list, tuple)):
        return len(expected) == len(value) and all(map(_is_same, expected, value))
    are_constants = not isinstance(value, fx.Node) and isinstance(value, bool) == isinstance(expected, bool)
    return value is expected or (are_constants and bool(value == expected))


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """Return a node's arguments by name, with defaults filled in, and with dimensions as nonnegative numbers."""
    return _with_nonnegative_dims(node, _traced_arguments(node))


def _traced_arguments(node: fx.Node) -> dict[str, Any]:
    """Return a node's arguments by name, with defaults filled in; `getitem` has no schema, and gets the names used here."""
    return dict(zip(("value", "index"), node.args, strict=True)) if node.target is operator.getitem else bound_arguments(node)


def _with_nonnegative_dims(node: fx.Node, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a node's arguments with dimensions as nonnegative numbers."""
    nonnegative = {}
    for name in DIMENSIONS & arguments.keys():
        first, dims = node.args[0], arguments[name]
        counts_results = not is_tensor(first) or node.target is aten.unsqueeze.default  # `cat` and `stack` read a list
        rank = max(len(shape_of_node(node if counts_results else first)), 1)  # type: ignore[arg-type]
        if dims is not None:
            nonnegative[name] = dims % rank if isinstance(dims, int) else [dim % rank for dim in dims]
    return {**arguments, **nonnegative}
