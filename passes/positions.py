"""Index arithmetic: which integer vectors are factor * index + offset?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import fx

from streamfx.ir.joint import bound_arguments, int_argument, is_size, is_tensor, node_argument, shape_of_node, tensor_operands
from streamfx.ir.sizes import Size, size_of

aten = torch.ops.aten
Known: TypeAlias = "Mapping[fx.Node, Affine | None]"


@dataclass(frozen=True)
class Affine:
    """factor * i + offset for index i along dimension `dim` (None: the same everywhere), equal along all others."""

    factor: int
    offset: int | float | bool
    dim: int | None


def affine_of(node: fx.Node, known: Known) -> Affine | None:
    """The node's value as an affine function of its index along one dimension, or None."""
    rule = _RULES.get(node.target)
    if rule is None:
        return _uniform(node, known)
    return rule(node, known)


def _affine(factor: int, offset: Any, dim: int | None) -> Affine:
    return Affine(factor, offset, dim if factor else None)


def _number(value: Any) -> int | float | bool | None:
    if is_size(value):
        value = value.meta["val"]
        value = value if isinstance(value, float) else size_of(value)
    return value if isinstance(value, (bool, int, float)) else None


def _operand(value: Any, known: Known) -> Affine | None:
    if is_tensor(value):
        return known.get(value)
    number = _number(value)
    return None if number is None else _affine(0, number, None)


def _arange(node: fx.Node, known: Known) -> Affine | None:
    arguments = bound_arguments(node)
    start, step = _number(arguments.get("start", 0)), _number(arguments.get("step", 1))
    integral = not node.meta["val"].is_floating_point()
    if isinstance(start, int) and isinstance(step, int) and integral:
        return _affine(step, start, 0)
    return None


def _filled(value: Any) -> Callable[[fx.Node, Known], Affine | None]:
    def rule(node: fx.Node, known: Known) -> Affine | None:
        number = _number(bound_arguments(node)["fill_value"]) if value is None else value
        if number is None:
            return None
        return _affine(0, bool(number) if node.meta["val"].dtype == torch.bool else number, None)

    return rule


def _scalar_tensor(node: fx.Node, known: Known) -> Affine | None:
    number = _number(node.args[0])
    return None if number is None else _affine(0, number, None)


def _sum(node: fx.Node, known: Known) -> Affine | None:
    arguments = bound_arguments(node)
    left, right = _operand(node.args[0], known), _operand(node.args[1], known)
    sign = 1 if node.target in (aten.add.Tensor, aten.add.Scalar) else -1
    if left is None or right is None or arguments.get("alpha", 1) != 1:
        return None
    a, b = _result_dim(node, 0, left), _result_dim(node, 1, right)
    if left.dim is not None and right.dim is not None and a != b:
        return None
    return _affine(left.factor + sign * right.factor, left.offset + sign * right.offset, a if left.dim is not None else b)


def _negated(node: fx.Node, known: Known) -> Affine | None:
    source = known.get(node_argument(node))
    if source is None or node.meta["val"].dtype not in (torch.int64, torch.int32):
        return None
    return _affine(-source.factor, -source.offset, source.dim)


def _product(node: fx.Node, known: Known) -> Affine | None:
    left, right = _operand(node.args[0], known), _operand(node.args[1], known)
    if left is None or right is None or node.meta["val"].is_floating_point():
        return None
    if left.dim is not None and right.dim is not None:
        return None
    varying, fixed, position = (left, right, 0) if left.dim is not None else (right, left, 1)
    if not isinstance(fixed.offset, int) or not isinstance(varying.offset, int):
        return None
    return _affine(varying.factor * fixed.offset, varying.offset * fixed.offset, _result_dim(node, position, varying))


def _result_dim(node: fx.Node, position: int, operand: Affine) -> int | None:
    """The dimension of the result that a broadcast operand varies along."""
    if operand.dim is None:
        return None
    source = node_argument(node, position)
    return operand.dim + len(shape_of_node(node)) - len(shape_of_node(source))


def _same(node: fx.Node, known: Known) -> Affine | None:
    source = known.get(node_argument(node))
    if source is None or (source.dim is not None and node.meta["val"].dtype not in (torch.int64, torch.int32, torch.bool)):
        return None
    if node.meta["val"].dtype == torch.bool:
        return None if source.dim is not None else _affine(0, bool(source.offset), None)
    return source


def _unsqueeze(node: fx.Node, known: Known) -> Affine | None:
    source = known.get(node_argument(node))
    if source is None or source.dim is None:
        return source
    inserted = int_argument(node, 1) % len(shape_of_node(node))
    return replace(source, dim=source.dim + (inserted <= source.dim))


def _expand(node: fx.Node, known: Known) -> Affine | None:
    source = known.get(node_argument(node))
    if source is None or source.dim is None:
        return source
    return replace(source, dim=_result_dim(node, 0, source))


def _view(node: fx.Node, known: Known) -> Affine | None:
    """Only views that add or drop dimensions of size one keep the index of the varying dimension."""
    source = known.get(node_argument(node))
    if source is None or source.dim is None:
        return source
    before, after = shape_of_node(node_argument(node)), shape_of_node(node)
    wide = [i for i, size in enumerate(before) if size != 1]
    kept = [i for i, size in enumerate(after) if size != 1]
    if [before[i] for i in wide] != [after[i] for i in kept] or source.dim not in wide:
        return None
    return replace(source, dim=kept[wide.index(source.dim)])


def _permute(node: fx.Node, known: Known) -> Affine | None:
    source = known.get(node_argument(node))
    if source is None or source.dim is None:
        return source
    rank = len(shape_of_node(node))
    if node.target is aten.permute.default:
        order = [dim % rank for dim in bound_arguments(node)["dims"]]
    else:
        order = list(range(rank))
        is_t = node.target is aten.t.default
        a, b = (0, rank - 1) if is_t else (int_argument(node, 1) % rank, int_argument(node, 2) % rank)
        order[a], order[b] = order[b], order[a]
    return replace(source, dim=order.index(source.dim))


def _slice(node: fx.Node, known: Known) -> Affine | None:
    source = known.get(node_argument(node))
    arguments = bound_arguments(node)
    rank = len(shape_of_node(node))
    if source is None or source.dim is None or source.dim != arguments["dim"] % rank:
        return source
    start, step = arguments["start"] or 0, arguments["step"]
    length = shape_of_node(node_argument(node))[source.dim]
    start = _number(start)
    if isinstance(start, int) and start < 0:
        start = start + length if isinstance(length, int) else None
    if not isinstance(start, int) or not isinstance(step, int):
        return None
    return replace(source, factor=source.factor * step, offset=source.offset + source.factor * start)


def _select(node: fx.Node, known: Known) -> Affine | None:
    source = known.get(node_argument(node))
    dim, position = int_argument(node, 1) % (len(shape_of_node(node)) + 1), _number(node.args[2])
    if source is None or source.dim is None:
        return source
    if source.dim != dim:
        return replace(source, dim=source.dim - (dim < source.dim))
    length = shape_of_node(node_argument(node))[dim]
    if isinstance(position, int) and position < 0:
        position = position + length if isinstance(length, int) else None
    return _affine(0, source.offset + source.factor * position, None) if isinstance(position, int) else None


def _cat(node: fx.Node, known: Known) -> Affine | None:
    """Pieces that continue one another are one affine vector: a first value before the rest of an `arange`."""
    arguments = bound_arguments(node)
    pieces, dim = arguments["tensors"], arguments["dim"] % len(shape_of_node(node))
    facts = [fact for piece in pieces if (fact := known.get(piece)) is not None]
    if len(facts) < len(pieces):
        return None
    lengths: list[Size] = [shape_of_node(piece)[dim] for piece in pieces]
    factors = {fact.factor for fact, n in zip(facts, lengths, strict=True) if n != 1 or fact.dim == dim}
    if len(factors) > 1 or any(fact.dim not in (dim, None) for fact in facts):
        return None
    factor = factors.pop() if factors else 0
    offset, position = facts[0].offset, 0
    for fact, length in zip(facts, lengths, strict=True):
        if fact.offset != offset + factor * position:
            return None
        if not isinstance(length, int):
            if fact is not facts[-1]:
                return None
            break
        position += length
    return _affine(factor, offset, dim)


def _cumsum(node: fx.Node, known: Known) -> Affine | None:
    """The running sum of a constant c is c * (i + 1)."""
    source = known.get(node_argument(node))
    if source is None or source.dim is not None:
        return None
    dim = int_argument(node, 1) % len(shape_of_node(node))
    return _affine(int(source.offset), int(source.offset), dim)


def _index(node: fx.Node, known: Known) -> Affine | None:
    """Looking up an affine vector by affine positions."""
    source, indices = known.get(node_argument(node)), bound_arguments(node)["indices"]
    if source is None:
        return None
    if source.dim is None:
        return source
    looked = [i for i, item in enumerate(indices) if item is not None]
    if len(looked) != len(shape_of_node(node_argument(node))) or source.dim not in looked:
        return None
    tensor = indices[source.dim]
    at = known.get(tensor)
    if at is None or at.factor < 0 or at.offset < 0:  # negative positions count from the end
        return None
    dim = None if at.dim is None else at.dim + len(shape_of_node(node)) - len(shape_of_node(tensor))
    return _affine(source.factor * at.factor, source.offset + source.factor * at.offset, dim)


def _uniform(node: fx.Node, known: Known) -> Affine | None:
    """Any pointwise operator on values that are the same everywhere, evaluated on those values."""
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    operands = tensor_operands(node)
    if not pointwise or not operands or any((fact := known.get(o)) is None or fact.dim is not None for o in operands):
        return None

    def number(item: Any) -> Any:
        if is_tensor(item):
            return torch.tensor(known[item].offset, dtype=item.meta["val"].dtype)  # type: ignore[union-attr]
        return _number(item) if isinstance(item, fx.Node) else item

    try:
        arguments = [number(item) for item in node.args]
        result = node.target(*arguments)  # type: ignore[operator]
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return None
    return _affine(0, result.item(), None)


_RULES: dict[Any, Callable[[fx.Node, Known], Affine | None]] = {
    aten.arange.default: _arange,
    aten.arange.start: _arange,
    aten.arange.start_step: _arange,
    aten.full.default: _filled(None),
    aten.zeros.default: _filled(0),
    aten.ones.default: _filled(1),
    aten.scalar_tensor.default: _scalar_tensor,
    aten.add.Tensor: _sum,
    aten.add.Scalar: _sum,
    aten.sub.Tensor: _sum,
    aten.sub.Scalar: _sum,
    aten.neg.default: _negated,
    aten.mul.Tensor: _product,
    aten.mul.Scalar: _product,
    aten._to_copy.default: _same,
    aten.clone.default: _same,
    aten.alias.default: _same,
    aten.detach.default: _same,
    aten.lift_fresh_copy.default: _same,
    aten.unsqueeze.default: _unsqueeze,
    aten.expand.default: _expand,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.reshape.default: _view,
    aten.squeeze.dim: _view,
    aten.squeeze.dims: _view,
    aten.squeeze.default: _view,
    aten.permute.default: _permute,
    aten.transpose.int: _permute,
    aten.t.default: _permute,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.cat.default: _cat,
    aten.cumsum.default: _cumsum,
    aten.index.Tensor: _index,
}
