"""Attention that is spelled out, with a column beside its scores (an attention sink): a fused kernel, and the sink's share.

A kernel gives its result and the log-sum-exp of the scores it saw. The sink only adds to that sum:

    softmax(cat([s, k]))[..., :-1] v = out w,   w = exp(lse - total),   total = logaddexp(lse, k)

A kernel's backward half makes the probabilities anew, exp(s - lse), and with the total for lse they are those beside the sink. The
rest of it asks for the result alone, as sum(gradient * result) of each row. So it is given the total and the scaled result. The
sink's gradient is -u sum(gradient * result), u = exp(k - total).

Where no key is seen lse is minus infinity and the result zero, as with the sink. Where the sink is infinite or no number, both
sides are no numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from streamfx.ir.joint import bound_arguments, is_tensor, shape_of_node
from streamfx.ir.sizes import Size, product
from streamfx.ir.writer import GraphWriter, size_arguments
from streamfx.passes.canonicalization.dropped_column import Column, column_of, converted, fits, is_part
from streamfx.passes.canonicalization.equation import equation
from streamfx.runtime.kernels import ATTENTION, ATTENTION_BACKWARD

aten = torch.ops.aten
Shape = tuple[Size, ...]

SAME_NUMBERS = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.expand.default,
    aten.clone.default,
    aten.detach.default,
    aten.alias.default,
)


@equation(aten._softmax.default)
def attention_with_a_sink(node: fx.Node, writer: GraphWriter) -> dict[fx.Node, fx.Node] | None:
    """p = softmax(cat([c q k^T + m, s]))[..., :-1]; p v   ->   attention(q, k, v, m, scale=c) with the sink's share

    With the gradients of q, k, v and s, where nothing else asks for the probabilities or for gradients of scores.
    """
    column = column_of(node)
    if column is None or column.dim != 3 or not fits(column):
        return None
    found = _Matched.of(column)
    return None if found is None else _Fused(found, writer).equals()


@dataclass
class _Matched:
    """The products around a softmax [b h m n] whose scores are `scale` times those of `query` [bh m d] and `keys` [bh d n], plus
    `mask`: that with `values` [bh n e], and the gradients of its operands and of the sink, from that of its result.
    """

    column: Column
    query: fx.Node
    keys: fx.Node
    scale: float
    mask: fx.Node | None
    values: fx.Node | None = None
    results: list[fx.Node] = field(default_factory=list)
    gradient: fx.Node | None = None
    of_query: list[fx.Node] = field(default_factory=list)
    of_keys: list[fx.Node] = field(default_factory=list)  # [bh n d]
    of_keys_transposed: list[fx.Node] = field(default_factory=list)  # [bh d n]
    of_values: list[fx.Node] = field(default_factory=list)
    of_sink: list[fx.Node] = field(default_factory=list)

    @staticmethod
    def of(column: Column) -> _Matched | None:
        """What is found around a softmax, if it is this and no more."""
        scores = _Scores.of(column.scores)
        if scores is None:
            return None
        found = _Matched(column, scores.query, scores.keys, scores.scale, scores.mask)
        backwards = [user for user in column.softmax.users if not is_part(user, column, column.scores_range)]
        parts = [user for user in column.softmax.users if user not in backwards]
        own = all(found.takes_probabilities(part) for part in parts)
        if not own or not all(found.takes_gradient(user, scores) for user in backwards):
            return None
        return found if found.results and found.is_of_one_type() else None

    def takes_probabilities(self, part: fx.Node) -> bool:
        """Whether probabilities go into the product with the values, and its gradients, and nowhere else."""
        for user, node in _uses(part):
            if user.target is aten.bmm.default and user.args[0] is node and user.args[1] is not node:
                if not self._is("values", user.args[1]):
                    return False
                self.results.append(user)
            elif not _is_transposed(user) or not all(self._takes_transposed(other, user) for other in user.users):
                return False
        return True

    def _takes_transposed(self, user: fx.Node, probabilities: fx.Node) -> bool:
        if user.target is not aten.bmm.default or user.args[0] is not probabilities or not self._is("gradient", user.args[1]):
            return False
        self.of_values.append(user)
        return True

    def takes_gradient(self, backward: fx.Node, scores: _Scores) -> bool:
        """Whether a gradient of scores is made of the product's, and goes into those of its operands, and of the sink."""
        given = _behind(bound_arguments(bound_arguments(backward)["grad_output"])["grad_output"])
        if given.target is not aten.bmm.default or not self._is("gradient", given.args[0]):
            return False
        if not _is_transposed(given.args[1]) or not self._is("values", given.args[1].args[0]):
            return False
        for part in backward.users:
            if is_part(part, self.column, self.column.column_range):
                self.of_sink.append(part)
            elif not all(self._takes_scaled(user, node) for user, node in scores.scaled(part)):
                return False
        return True

    def _takes_scaled(self, user: fx.Node, node: fx.Node) -> bool:
        if user.target is aten.bmm.default:
            return self._takes_product(user, node)
        if not _is_transposed(user):
            return False
        products = [other.target is aten.bmm.default and other.args == (user, self.query) for other in user.users]
        self.of_keys.extend(user.users)
        return all(products)

    def _takes_product(self, product: fx.Node, gradient: fx.Node) -> bool:
        left, right = product.args
        if left is gradient and _is_transposed(right) and right.args[0] is self.keys:
            self.of_query.append(product)
        elif right is gradient and _is_transposed(left) and left.args[0] is self.query:
            self.of_keys_transposed.append(product)
        else:
            return False
        return True

    def _is(self, name: str, value: Any) -> bool:
        """Whether an operand is the one that was seen before, or the first one that is seen."""
        if not is_tensor(value):
            return False
        known = getattr(self, name)
        if known is None:
            setattr(self, name, value)
        return known is None or known is value

    def is_of_one_type(self) -> bool:
        operands = (self.query, self.keys, self.values, self.gradient, self.mask, *self.results)
        return len({node.meta["val"].dtype for node in operands if node is not None}) == 1

    @property
    def folded(self) -> tuple[Size, Size]:
        """Sequences and heads, which products have in one dimension."""
        batch, heads, *_ = shape_of_node(self.column.scores)
        return batch, heads


@dataclass(frozen=True)
class _Scores:
    """Scores [b h m n]: a product [bh m n] times a number, and a mask that is added to it."""

    query: fx.Node
    keys: fx.Node
    scale: float
    scaling: tuple[Any, float] | None
    mask: fx.Node | None

    @staticmethod
    def of(scores: fx.Node) -> _Scores | None:
        node, mask = _behind(scores), None
        if node.target is aten.add.Tensor:
            left, right, alpha = bound_arguments(node).values()
            pairs = [(one, other) for one, other in ((left, right), (right, left)) if is_tensor(one) and is_tensor(other)]
            found = next(((_product(one), other) for one, other in pairs if _product(one) is not None), None)
            if alpha != 1 or found is None or len(shape_of_node(found[1])) not in (2, 3, 4):
                return None
            node, mask = _behind(next(one for one, other in pairs if other is found[1])), found[1]
        found_product = _product(node)
        if found_product is None:
            return None
        product, scaling = found_product
        factor = 1.0 if scaling is None else scaling[1] if scaling[0] is aten.mul.Tensor else 1 / scaling[1]
        return _Scores(product.args[0], product.args[1], factor, scaling, mask)  # type: ignore[arg-type]

    def scaled(self, gradient: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
        """The uses of a gradient of scores, once it was scaled as these were."""
        if self.scaling is None:
            yield from _uses(gradient)
            return
        for user, node in _uses(gradient):
            if user.target is self.scaling[0] and user.args == (node, self.scaling[1]):
                yield from _uses(user)
            else:
                yield gradient, gradient  # which is no product


def _product(node: fx.Node) -> tuple[fx.Node, tuple[Any, float] | None] | None:
    """A batched product, and the multiplication or division by a number behind it."""
    node, scaling = _behind(node), None
    if node.target in (aten.mul.Tensor, aten.div.Tensor) and isinstance(node.args[1], (int, float)) and node.args[1]:
        scaling = node.target, float(node.args[1])
        node = _behind(node.args[0])  # type: ignore[arg-type]
    return (node, scaling) if node.target is aten.bmm.default else None


def _behind(node: fx.Node) -> fx.Node:
    """What a value shows: the same numbers, with sequences and heads in one dimension or in two."""
    while node.target in SAME_NUMBERS and _is_fold(node, node.args[0]):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _uses(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Each operator that takes the numbers of a value, with the node by which it takes them."""
    for user in node.users:
        if user.target in SAME_NUMBERS and user.args[0] is node and _is_fold(user, node):
            yield from _uses(user)
        else:
            yield user, node


def _is_fold(node: fx.Node, source: Any) -> bool:
    """Whether of two values of the same numbers at most the first two dimensions of one are one dimension of the other."""
    own, other = (shape_of_node(item) for item in (node, source))
    if node.meta["val"].dtype != source.meta["val"].dtype or len(own) < 2 or len(other) < 2:
        return False
    return own == other or _joined(own) == other or own == _joined(other)


def _joined(shape: Shape) -> Shape:
    return (product(shape[:2]), *shape[2:]) if len(shape) == 4 else shape


def _is_transposed(node: Any) -> bool:
    """Whether a value is another [bh m n] with its last dimensions changed about."""
    if not is_tensor(node) or node.target is not aten.transpose.int or len(shape_of_node(node)) != 3:
        return False
    return {dim % 3 for dim in node.args[1:]} == {1, 2}


class _Fused:
    """What stands on the right."""

    def __init__(self, found: _Matched, writer: GraphWriter) -> None:
        self.found, self.writer = found, writer
        self.precision = torch.promote_types(found.query.meta["val"].dtype, torch.float32)

    def equals(self) -> dict[fx.Node, fx.Node]:
        found, order = self.found, {node: i for i, node in enumerate(self.found.query.graph.nodes)}
        self.write_forward(self.writer.before(min(found.results, key=order.__getitem__)))
        equals = dict(pair for result in found.results for pair in self.given(result, self.out))
        made = [*found.of_values, *found.of_query, *found.of_keys, *found.of_keys_transposed, *found.of_sink]
        if found.gradient is not None and made:
            after = max(order[found.gradient], *(order[result] for result in found.results))
            equals |= self.backward(next(node for node, i in order.items() if i > after and node.op == "call_function"))
        return equals

    def write_forward(self, writer: GraphWriter) -> None:
        found, write = self.found, writer.call
        assert found.values is not None
        self.query, self.values = self.heads(found.query, writer), self.heads(found.values, writer)
        self.keys = write(aten.transpose.int, self.heads(found.keys, writer), 2, 3)
        self.options = {"scale": found.scale} if found.mask is None else {"attn_mask": found.mask, "scale": found.scale}
        made = write(ATTENTION, self.query, self.keys, self.values, **self.options)
        out, lse = (write(operator.getitem, made, i) for i in range(2))
        sink = write(aten.squeeze.dim, converted(writer, found.column.column, self.precision), 3)
        lse = converted(writer, lse, self.precision)
        self.total = write(aten.logaddexp.default, lse, sink)
        self.rest = write(aten.exp.default, write(aten.sub.Tensor, sink, self.total))
        share = write(aten.exp.default, write(aten.sub.Tensor, lse, self.total))
        share = write(aten.add.Tensor, share, write(aten.mul.Tensor, self.rest, 0))  # no number where the sink is none
        shown = write(aten.mul.Tensor, converted(writer, out, self.precision), write(aten.unsqueeze.default, share, 3))
        self.out = converted(writer, shown, found.query.meta["val"].dtype)

    def backward(self, point: fx.Node) -> dict[fx.Node, fx.Node]:
        found, writer = self.found, self.writer.before(point)
        assert found.gradient is not None
        gradient = self.heads(found.gradient, writer)
        given = gradient, self.query, self.keys, self.values, self.out, self.total
        made = writer.call(ATTENTION_BACKWARD, *given, **self.options)
        of_query, of_key, of_value = (writer.call(operator.getitem, made, i) for i in range(3))
        transposed = writer.call(aten.transpose.int, of_key, 2, 3)
        parts = (found.of_query, of_query), (found.of_keys, of_key), (found.of_keys_transposed, transposed)
        equals = {}
        for nodes, value in (*parts, (found.of_values, of_value)):
            for node in nodes:
                equals |= dict(self.given(node, value))
        return equals | dict.fromkeys(found.of_sink, self.of_sink(gradient, writer)) if found.of_sink else equals

    def of_sink(self, gradient: fx.Node, writer: GraphWriter) -> fx.Node:
        wide = (converted(writer, item, self.precision) for item in (gradient, self.out))
        inner = writer.call(aten.sum.dim_IntList, writer.call(aten.mul.Tensor, *wide), [3])
        made = writer.call(aten.mul.Tensor, writer.call(aten.neg.default, self.rest), inner)
        return converted(writer, writer.call(aten.unsqueeze.default, made, 3), self.found.of_sink[0].meta["val"].dtype)

    def heads(self, node: fx.Node, writer: GraphWriter) -> fx.Node:
        """The numbers of a value [bh m d] as [b h m d]: the value that they were folded from, where there is one."""
        source = _behind(node)
        if shape_of_node(source) == (*self.found.folded, *shape_of_node(node)[1:]):
            return source
        sizes = [*size_arguments(self.found.column.scores, writer)[:2], *size_arguments(node, writer)[1:]]
        return writer.call(aten.view.default, node, sizes)

    def given(self, node: fx.Node, made: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
        """What values [b h m d] stand for: views of a product [bh m d] that show it so, and the product itself."""
        views = [user for user in node.users if user.target in SAME_NUMBERS and shape_of_node(user) == shape_of_node(made)]
        yield from ((view, made) for view in views)
        if len(views) < len(node.users):
            whole = self.writer.call(aten.clone.default, made, memory_format=torch.contiguous_format)
            yield node, self.writer.call(aten.view.default, whole, size_arguments(node, self.writer))
