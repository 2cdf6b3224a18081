"""Match unfused attention: the products around a softmax of scores, and their gradients, in a joint graph.

    s = c q k^T + m,  o = p v,  dv = p^T do,  dp = do v^T,  dq = c ds k,  dk = c ds^T q

s are the scores, p = softmax(s) the probabilities, m a mask, do and ds the gradients of the result o and of the scores. In
shapes, `bh` is the batch and the heads in one dimension, as in `bmm`; m and n are query and key positions. Values are
matched through views (also copies and aliases) that keep their elements and at most merge or split batch and heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import fx

from streamfx.ir.joint import shape_of_node
from streamfx.ir.operator_table import COPIES, Kind, of_kind
from streamfx.ir.sizes import Size, product
from streamfx.node_meta import VALUE
from streamfx.passes.rewrite.pattern import Captures, Either, Op, Pattern, Through, Where, either, match_uses, op, tensor

aten = torch.ops.aten
Shape = tuple[Size, ...]

KEEPS_ELEMENTS = COPIES | of_kind(Kind.RESHAPE, Kind.EXPAND)


def _views(pattern: Any) -> Through:
    """Return a pattern of a value's views that keep its elements, and at most merge or split batch and heads."""
    return Through(KEEPS_ELEMENTS, pattern, keeps=_is_equal_or_folded)


def before_views(node: fx.Node) -> fx.Node:
    """Return the value before any such views."""
    value: fx.Node = _views(...).skip(node)
    return value


def _transposed(pattern: Any) -> Either:
    """Return a pattern of the transpose of a batch of matrices."""
    return either(op(aten.transpose.int, pattern, 1, 2), op(aten.transpose.int, pattern, 2, 1))


def _is_equal_or_folded(view: fx.Node) -> bool:
    """Return whether a view and its operand have equal shapes, or one of them merges batch and heads: [b h m n] and [bh m n].

    Also return False if the dtype differs, or if there are fewer than two dimensions.
    """
    source: Any = view.args[0]
    shape, source_shape = shape_of_node(view), shape_of_node(source)
    if view.meta[VALUE].dtype != source.meta[VALUE].dtype or len(shape) < 2 or len(source_shape) < 2:
        return False
    return shape == source_shape or _flat_shape(shape) == source_shape or shape == _flat_shape(source_shape)


def _flat_shape(shape: Shape) -> Shape:
    """Merge batch and heads in a shape: (b, h, m, n) -> (b * h, m, n). Return other shapes unchanged."""
    return (product(shape[:2]), *shape[2:]) if len(shape) == 4 else shape


def _is_nonzero_number(value: Any) -> bool:
    """Return whether an argument is a number other than zero, which can be the scale of scores."""
    return isinstance(value, (int, float)) and value != 0


# -- patterns, for each of three ways to scale the product: not at all, by a multiplication, by a division

SCALINGS: tuple[Callable[[Any], Any], ...] = (
    lambda product: product,
    lambda product: op(aten.mul.Tensor, product, Where(_is_nonzero_number, "multiplier")),
    lambda product: op(aten.div.Tensor, product, Where(_is_nonzero_number, "divisor")),
)


@dataclass(frozen=True)
class _Form:
    """The patterns of scores c q k^T + m, and of the gradients of q and k, for one way to scale."""

    scores: Pattern
    operand_gradients: Mapping[str, Op]

    @classmethod
    def of(cls, scale: Callable[[Any], Any]) -> _Form:
        """Return the patterns for scores that are scaled as the pattern that `scale` returns for that of their product."""
        product = _views(scale(_views(op(aten.bmm.default, "query", "keys", name="product"))))
        gradient = _views(scale(_views("scores_gradient")))
        return cls(
            _views(either(op(aten.add.Tensor, product, tensor("mask"), name="masked"), product)),
            {
                "query_gradients": op(aten.bmm.default, gradient, _transposed("keys")),
                "transposed_key_gradients": op(aten.bmm.default, _transposed("query"), gradient),
                "key_gradients": op(aten.bmm.default, _transposed(gradient), "query"),
            },
        )


FORMS = tuple(map(_Form.of, SCALINGS))
PROBABILITY_USES = {
    "results": op(aten.bmm.default, _views("probabilities"), "values"),
    "value_gradients": op(aten.bmm.default, _transposed(_views("probabilities")), "gradient"),
}
PROBABILITIES_GRADIENT = _views(op(aten.bmm.default, "gradient", _transposed("values")))


# -- matching


@dataclass(frozen=True)
class UnfusedAttention:
    """The nodes of one unfused attention: operands, products p v, and the gradients of q, k and v; all are captures."""

    query: fx.Node  # [bh m d]
    keys: fx.Node  # [bh d n]
    values: fx.Node  # [bh n e]
    results: Sequence[fx.Node]  # each is the product of probabilities and values
    mask: fx.Node | None = None
    multiplier: float = 1  # of the product of queries and keys
    divisor: float = 1
    gradient: fx.Node | None = None  # of the result
    query_gradients: Sequence[fx.Node] = ()
    key_gradients: Sequence[fx.Node] = ()  # [bh n d]
    transposed_key_gradients: Sequence[fx.Node] = ()  # [bh d n]
    value_gradients: Sequence[fx.Node] = ()

    @property
    def scale(self) -> float:
        """Return the factor of the scores."""
        return self.multiplier / self.divisor

    @property
    def gradients(self) -> list[fx.Node]:
        """Return all gradients of operands."""
        return [*self.query_gradients, *self.key_gradients, *self.transposed_key_gradients, *self.value_gradients]

    @property
    def last_needed(self) -> fx.Node:
        """Return the last node, in graph order, on which the gradients depend: a result or its gradient."""
        return max([*self.results, *([] if self.gradient is None else [self.gradient])])

    def fits_kernel(self) -> bool:
        """Return whether a fused kernel can compute the match: all operands have one dtype.

        Values must have at least one column, and the gradient of the result must have its shape.
        """
        if not shape_of_node(self.values)[-1]:
            return False
        if self.gradient is not None and shape_of_node(self.gradient) != shape_of_node(self.results[0]):
            return False
        operands = (self.query, self.keys, self.mask, self.values, self.gradient, *self.results)
        return len({node.meta[VALUE].dtype for node in operands if node is not None}) == 1


def match_attention(
    scores: fx.Node,
    probabilities: Iterable[fx.Node],
    probability_gradients: Iterable[fx.Node],
    scores_gradients: Iterable[fx.Node],
) -> UnfusedAttention | None:
    """Match the products before and after a softmax of `scores` [b h m n], and their gradients.

    The last three arguments are what is read from the softmax and its backwards, and what they read. Return None if the
    scores are not c q k^T + m, or if the probabilities or the gradients of the scores have another use.
    """
    matches = ((form, captures) for form in FORMS for captures in form.scores.matches(scores, {}))
    form, captures = next((match for match in matches if _has_full_scores(scores, match[1])), (None, None))
    for node in probabilities:
        captures = captures and match_uses("probabilities", node, PROBABILITY_USES, captures)
    for node in probability_gradients:
        captures = captures and PROBABILITIES_GRADIENT.match(node, captures)
    for node in scores_gradients:
        captures = captures and match_uses("scores_gradient", node, form.operand_gradients, captures)  # type: ignore[union-attr]
    if captures is None or "results" not in captures:
        return None
    return UnfusedAttention(**{field.name: captures[field.name] for field in fields(UnfusedAttention) if field.name in captures})


def _has_full_scores(scores: fx.Node, captures: Captures) -> bool:
    """Return whether the product has one score for each of the `scores` [b h m n], and so has the sum with a mask, if any.

    Adding the mask may not broadcast the product, and a mask of another shape, such as [bh m n], does not apply.
    """
    shape = shape_of_node(scores)
    if "mask" in captures and (shape_of_node(captures["masked"]) != shape or not 2 <= len(shape_of_node(captures["mask"])) <= 4):
        return False
    return shape_of_node(captures["product"]) == _flat_shape(shape)
