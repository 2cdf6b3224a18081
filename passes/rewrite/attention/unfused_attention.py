"""Match unfused attention: the products around a softmax of scores, and their gradients, in a joint graph.

    s = c q k^T + m,  o = p v,  dv = p^T do,  dp = do v^T,  dq = c ds k,  dk = c ds^T q

s are the scores, p = softmax(s) the probabilities, m a mask, do and ds the gradients of the result o and of the scores. In
shapes, `bh` is the batch and the heads in one dimension, as in `bmm`; m and n are query and key positions. Values are
matched through views (also copies and aliases) that keep their elements and at most merge or split batch and heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from streamfx.ir.joint import bound_arguments, is_tensor, shape_of_node
from streamfx.ir.operator_table import COPIES, Kind, of_kind
from streamfx.ir.sizes import Size, product
from streamfx.node_meta import VALUE

aten = torch.ops.aten
Shape = tuple[Size, ...]
Scaling = tuple[Any, float]

KEEPS_ELEMENTS = COPIES | of_kind(Kind.RESHAPE, Kind.EXPAND)


@dataclass(frozen=True)
class Scores:
    """Scores [b h m n]: `scale` times the product of `query` [bh m d] and `keys` [bh d n], plus `mask`."""

    query: fx.Node
    keys: fx.Node
    scaling: Scaling | None  # (aten.mul.Tensor or aten.div.Tensor, number): how the product is scaled
    mask: fx.Node | None

    @staticmethod
    def match(scores: fx.Node) -> Scores | None:
        """Match scores [b h m n] as c q k^T, or as c q k^T + m; return None if they are neither."""
        node, shape = through_views(scores), shape_of_node(scores)
        if node.target is not aten.add.Tensor:
            return Scores._match_product(node, None, shape)
        left, right, alpha = bound_arguments(node).values()
        if alpha != 1 or not is_tensor(left) or not is_tensor(right) or shape_of_node(node) != shape:
            return None  # a mask of another shape, such as [bh m n], does not apply to these scores
        pairs = ((left, right), (right, left))
        return next((match for pair in pairs if (match := Scores._match_product(*pair, shape)) is not None), None)

    @staticmethod
    def _match_product(node: fx.Node, mask: fx.Node | None, shape: Shape) -> Scores | None:
        """Match `node` as a product, times or divided by a number, and return it as scores with the given mask.

        `shape` [b h m n] is the shape of the scores. The product must also have it, because adding the mask may not
        broadcast it. Return None if nothing matches.
        """
        node = through_views(node)
        scaling = None
        if node.target in (aten.mul.Tensor, aten.div.Tensor) and isinstance(node.args[1], (int, float)) and node.args[1]:
            scaling = node.target, float(node.args[1])
            node = through_views(node.args[0])
        operands = match_bmm(node)
        is_mask_supported = mask is None or 2 <= len(shape_of_node(mask)) <= 4
        if operands is None or shape_of_node(node) != _flat_shape(shape) or not is_mask_supported:
            return None
        return Scores(*operands, scaling, mask)

    @property
    def scale(self) -> float:
        """Return the factor of the scores."""
        if self.scaling is None:
            return 1.0
        target, number = self.scaling
        return number if target is aten.mul.Tensor else 1 / number

    def uses_of_gradient(self, gradient: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
        """Yield (user, operand) for each use of the scores' gradient `ds`, after it is scaled as the product was: c ds.

        A use that does not scale it yields (gradient, gradient), which no product matches.
        """
        for user, node in uses_through_views(gradient):
            if self.scaling is None:
                yield user, node
            elif user.target is self.scaling[0] and user.args == (node, self.scaling[1]):
                yield from uses_through_views(user)
            else:
                yield gradient, gradient


@dataclass
class UnfusedAttention:
    """The nodes of one unfused attention, recorded as they are matched: products p v, and the gradients of q, k and v."""

    scores: Scores
    values: fx.Node | None = None  # [bh n e]
    results: list[fx.Node] = field(default_factory=list)  # each is the product of probabilities and values
    gradient: fx.Node | None = None  # of the result
    query_gradients: list[fx.Node] = field(default_factory=list)
    key_gradients: list[fx.Node] = field(default_factory=list)  # [bh n d]
    transposed_key_gradients: list[fx.Node] = field(default_factory=list)  # [bh d n]
    value_gradients: list[fx.Node] = field(default_factory=list)

    def record_probability_uses(self, probabilities: fx.Node) -> bool:
        """Record the products p v (`results`) and p^T do (`value_gradients`); return whether nothing else uses p."""
        for user, node in uses_through_views(probabilities):
            left, right = match_bmm(user) or (None, None)
            if left is node and right is not node and self._record_or_compare("values", right):
                self.results.append(user)
            elif not is_transpose_of(user, node) or not all(self._record_value_gradient(reader, user) for reader in user.users):
                return False
        return True

    def _record_value_gradient(self, user: fx.Node, probabilities: fx.Node) -> bool:
        """Record `user` as the gradient of the values, and return whether it is the product of p^T and the result's gradient.

        `probabilities` is p^T. The result's gradient is recorded at its first use, and must be the same at all others.
        """
        left, right = match_bmm(user) or (None, None)
        self.value_gradients.append(user)
        return left is probabilities and self._record_or_compare("gradient", right)

    def is_gradient_of_probabilities(self, value: fx.Node) -> bool:
        """Return whether a value is dp = do v^T: the product of the result's gradient and the transposed values."""
        left, right = match_bmm(through_views(value)) or (None, None)
        return self._record_or_compare("gradient", left) and self.values is not None and is_transpose_of(right, self.values)

    def record_gradient_uses(self, scores_gradient: fx.Node) -> bool:
        """Record the gradients of q and k that are computed from the scores' gradient; return whether nothing else uses it."""
        return all(self._record_operand_gradient(user, node) for user, node in self.scores.uses_of_gradient(scores_gradient))

    def _record_operand_gradient(self, user: fx.Node, gradient: fx.Node) -> bool:
        """Record the gradient of q or k that `user` computes from the scaled gradient of scores; return False if it is neither.

        Matched are dq = ds k, dk^T = q^T ds, and dk = ds^T q, where `user` is the transpose ds^T.
        """
        left, right = match_bmm(user) or (None, None)
        if left is gradient and is_transpose_of(right, self.scores.keys):
            self.query_gradients.append(user)
        elif right is gradient and is_transpose_of(left, self.scores.query):
            self.transposed_key_gradients.append(user)
        elif is_transpose_of(user, gradient):
            self.key_gradients.extend(user.users)
            return all(match_bmm(reader) == (user, self.scores.query) for reader in user.users)
        else:
            return False
        return True

    def _record_or_compare(self, name: str, value: Any) -> bool:
        """Set the field `name` ("values" or "gradient") at the first call; later, return whether the value is the same node.

        Return False if `value` is not a tensor.
        """
        if not is_tensor(value):
            return False
        recorded = getattr(self, name)
        if recorded is None:
            setattr(self, name, value)
        return recorded is None or recorded is value

    @property
    def gradients(self) -> list[fx.Node]:
        """Return all recorded gradients of operands."""
        return [*self.query_gradients, *self.key_gradients, *self.transposed_key_gradients, *self.value_gradients]

    @property
    def last_needed(self) -> fx.Node:
        """Return the last node, in graph order, on which the gradients depend: a result or its gradient."""
        return max([*self.results, *([] if self.gradient is None else [self.gradient])])

    def fits_kernel(self) -> bool:
        """Return whether a fused kernel can compute the match: there is a product p v, and all operands have one dtype.

        Values must have at least one column, and the gradient of the result must have its shape.
        """
        if not self.results or self.values is None or not shape_of_node(self.values)[-1]:
            return False
        if self.gradient is not None and shape_of_node(self.gradient) != shape_of_node(self.results[0]):
            return False
        operands: Iterable[fx.Node | None] = (self.scores.query, self.scores.keys, self.scores.mask, self.values, self.gradient)
        return len({node.meta[VALUE].dtype for node in (*operands, *self.results) if node is not None}) == 1


def match_bmm(node: Any) -> tuple[fx.Node, fx.Node] | None:
    """Return the two operands of a batched matrix product (`bmm`); None if `node` is not one."""
    is_product = isinstance(node, fx.Node) and node.target is aten.bmm.default
    return node.args if is_product else None


def through_views(node: Any) -> fx.Node:
    """Return the value before any views and copies that keep its elements, and at most merge or split batch and heads."""
    while node.target in KEEPS_ELEMENTS and _is_equal_or_folded(node, node.args[0]):
        node = node.args[0]
    return node


def uses_through_views(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield (user, operand) for each user of a value, looking through views and copies that keep its elements.

    `operand` is the value, or the last view before the user: for product(view(value), x), yield (product, view).
    """
    for user in node.users:
        if user.target in KEEPS_ELEMENTS and user.args[0] is node and _is_equal_or_folded(user, node):
            yield from uses_through_views(user)
        else:
            yield user, node


def is_transpose_of(node: Any, source: fx.Node) -> bool:
    """Return whether `node` transposes the last two dimensions of `source` [bh m n]."""
    if not is_tensor(node) or node.target is not aten.transpose.int or len(shape_of_node(node)) != 3:
        return False
    return node.args[0] is source and {dim % 3 for dim in node.args[1:]} == {1, 2}


def _is_equal_or_folded(node: fx.Node, source: Any) -> bool:
    """Return whether a view and its operand have equal shapes, or one of them merges batch and heads: [b h m n] and [bh m n].

    Also return False if the dtype differs, or if there are fewer than two dimensions.
    """
    shape, source_shape = (shape_of_node(item) for item in (node, source))
    if node.meta[VALUE].dtype != source.meta[VALUE].dtype or len(shape) < 2 or len(source_shape) < 2:
        return False
    return shape == source_shape or _flat_shape(shape) == source_shape or shape == _flat_shape(source_shape)


def _flat_shape(shape: Shape) -> Shape:
    """Merge batch and heads in a shape: (b, h, m, n) -> (b * h, m, n). Return other shapes unchanged."""
    return (product(shape[:2]), *shape[2:]) if len(shape) == 4 else shape
