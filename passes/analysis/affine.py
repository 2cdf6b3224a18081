"""Index arithmetic: find integer values with the *affine form* factor * i + offset, exact in their dtype.

`i` is the index along one dimension; the value is constant along all others: `2 * arange(n)[:, None] + 1` has factor 2,
offset 1 and dimension 0. Masks are comparisons of such values. Each rule below derives the form of one operator's result from
the forms of its operands, which `Positions` has recorded; None if the result has none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from streamfx.ir.joint import bound_arguments, int_argument, node_argument, shape_of_node
from streamfx.ir.operator_table import Kind, is_kind, of_kind
from streamfx.ir.ranges import Range, is_exact_in
from streamfx.ir.sizes import Size
from streamfx.node_meta import VALUE
from streamfx.passes.ops.ranges import ValueRanges
from streamfx.passes.ops.ranges.transfer import max_size, named_arguments, range_of_argument

aten = torch.ops.aten
INDEX_DTYPES = (torch.int64, torch.int32)  # dtypes of indices: booleans and bytes are masks


@dataclass(frozen=True)
class Affine:
    """factor * i + offset for index i along dimension `dim` (None: a constant), and constant along all other dimensions."""

    factor: int
    offset: int
    dim: int | None


class Positions:
    """The affine forms of a graph's values, found in program order: operands before their users."""

    def __init__(self, values: ValueRanges) -> None:
        """Start without forms; `values` knows the range of each value, and gets those that this class finds."""
        self._values = values
        self._affine_of: dict[fx.Node, Affine | None] = {}

    def of(self, node: Any) -> Affine | None:
        """Return the recorded affine form of a value that varies along one dimension; None for constants and all others."""
        return self._affine_of.get(node) if isinstance(node, fx.Node) else None

    def find(self, node: fx.Node) -> Affine | None:
        """Find the affine form of a value from those of its operands; record it, and the range of the value's elements.

        None if it has none, if it is a constant (then only the range is recorded), or if its dtype wraps or rounds a number.
        """
        rule = _RULES.get(node.target)
        affine = rule(node, self) if rule is not None else None
        self._affine_of[node] = None
        if affine is None or not self.is_exact(affine, node, node.meta[VALUE].dtype):
            return None
        value_range = extent(affine, shape_of_node(node))
        self._values.note(node, value_range)
        if value_range.constant is None:  # else it is a constant, and has no varying dimension
            self._affine_of[node] = affine
        return self._affine_of[node]

    def is_exact(self, affine: Affine, node: fx.Node, dtype: torch.dtype) -> bool:
        """Return whether a dtype represents all numbers of an affine form, for indices within the node's shape, exactly."""
        value_range = extent(affine, shape_of_node(node))
        return is_exact_in(dtype, value_range.low, value_range.high)

    def operand(self, value: Any, dtype: torch.dtype) -> Affine | None:
        """Return the affine form of an operand (node or number); an integer constant has factor 0 and no dimension.

        `dtype`: in which the operator computes. None if it does not represent all numbers exactly, or there is no form.
        """
        affine = self.of(value)
        if affine is not None:
            return affine if self.is_exact(affine, value, dtype) else None
        constant = self.integer(value)
        return None if constant is None or not is_exact_in(dtype, constant, constant) else Affine(0, constant, None)

    def integer(self, value: Any) -> int | None:
        """Return the integer that all elements of a value (node or number) equal; None if they provably do not, or may not."""
        common_value = range_of_argument(value, self._values.of).constant if _is_numeric(value) else None
        return (
            int(common_value)
            if common_value is not None and abs(common_value) != float("inf") and common_value == int(common_value)
            else None
        )


def extent(affine: Affine, shape: tuple[Size, ...]) -> Range:
    """Return the range of the elements of a value with this affine form and shape: from its first to its last index."""
    last = 0 if affine.dim is None else affine.factor * max(max_size(shape[affine.dim]) - 1, 0)
    return Range(affine.offset + min(last, 0), affine.offset + max(last, 0))


def _is_numeric(value: Any) -> bool:
    return isinstance(value, (bool, int, float)) or (isinstance(value, fx.Node) and value.meta.get(VALUE) is not None)


def _affine_or_constant(factor: int, offset: int, dim: int | None) -> Affine:
    """Return an affine form; with factor 0 it is a constant and has no dimension."""
    return Affine(factor, offset, dim if factor else None)


def _arange(node: fx.Node, positions: Positions) -> Affine | None:
    """Return the affine form of `arange(start, end, step)`: step * i + start."""
    arguments = bound_arguments(node)
    start, step = positions.integer(arguments.get("start", 0)), positions.integer(arguments.get("step", 1))
    return None if start is None or step is None else _affine_or_constant(step, start, 0)


LINEAR_COMBINATIONS = of_kind(Kind.ADD, Kind.SUBTRACT, Kind.SUBTRACT_FROM)


def linear_combination(node: fx.Node) -> tuple[tuple[int, Any], tuple[int, Any]] | None:
    """Return ((a, x), (b, y)) if a node computes a * x + b * y with integers a and b, else None.

    For x - 2 * y: ((1, x), (-2, y)). x and y are nodes or numbers.
    """
    if node.target not in LINEAR_COMBINATIONS:
        return None
    arguments = named_arguments(node, frozenset({"self", "other", "alpha"}))
    if arguments is None or type(arguments["alpha"]) is not int:
        return None
    self, other, alpha = arguments["self"], arguments["other"], arguments["alpha"]
    if is_kind(node, Kind.SUBTRACT_FROM):
        return (-alpha, self), (1, other)
    return (1, self), (-alpha if is_kind(node, Kind.SUBTRACT) else alpha, other)


def _sum(node: fx.Node, positions: Positions) -> Affine | None:
    """Return the affine form of a * x + b * y; None unless x and y vary along at most one, common dimension."""
    combined, dtype = linear_combination(node), node.meta[VALUE].dtype
    if combined is None:
        return None
    (a, x), (b, y) = combined
    x_form, y_form = positions.operand(x, dtype), positions.operand(y, dtype)
    if x_form is None or y_form is None or not is_exact_in(dtype, min(a, b), max(a, b)):
        return None
    varying_dims = {dim for item, form in ((x, x_form), (y, y_form)) if (dim := _result_dim(node, item, form)) is not None}
    if len(varying_dims) > 1:
        return None
    return _affine_or_constant(
        factor=a * x_form.factor + b * y_form.factor,
        offset=a * x_form.offset + b * y_form.offset,
        dim=varying_dims.pop() if varying_dims else None,
    )


def _neg(node: fx.Node, positions: Positions) -> Affine | None:
    """Return the affine form of the negated operand."""
    source = positions.of(node_argument(node))
    return None if source is None else _affine_or_constant(-source.factor, -source.offset, source.dim)


def _product(node: fx.Node, positions: Positions) -> Affine | None:
    """Return the affine form of a product of a value with an affine form and an integer constant, in either order."""
    arguments, dtype = named_arguments(node, frozenset({"self", "other"})), node.meta[VALUE].dtype
    if arguments is None:
        return None
    x, y = arguments["self"], arguments["other"]
    x_form, y_form = positions.operand(x, dtype), positions.operand(y, dtype)
    if x_form is None or y_form is None or (x_form.dim is None) == (y_form.dim is None):
        return None
    varying, constant, operand = (x_form, y_form, x) if x_form.dim is not None else (y_form, x_form, y)
    number = constant.offset
    return _affine_or_constant(varying.factor * number, varying.offset * number, _result_dim(node, operand, varying))


def _result_dim(node: fx.Node, operand: Any, affine: Affine) -> int | None:
    """Return the dimension of `node`'s result along which a broadcast operand with this affine form varies; None for none."""
    return None if affine.dim is None else affine.dim + len(shape_of_node(node)) - len(shape_of_node(operand))


def _same_as_operand(node: fx.Node, positions: Positions) -> Affine | None:
    """Return the first operand's affine form: copies and casts keep it."""
    return positions.of(node_argument(node))


def _unsqueeze(node: fx.Node, positions: Positions) -> Affine | None:
    """Return the affine form of `x.unsqueeze(dim)`: its dimension shifts by one if the new one is inserted before it."""
    source = positions.of(node_argument(node))
    if source is None or source.dim is None:
        return None
    inserted = int_argument(node, 1) % len(shape_of_node(node))
    return replace(source, dim=source.dim + (inserted <= source.dim))


def _expand(node: fx.Node, positions: Positions) -> Affine | None:
    """Return the affine form of an expanded operand: its dimension shifts by the number of new leading dimensions."""
    source = positions.of(node_argument(node))
    if source is None or source.dim is None:
        return None
    return replace(source, dim=_result_dim(node, node_argument(node), source))


def _view(node: fx.Node, positions: Positions) -> Affine | None:
    """Return the affine form after a view that only adds or drops dimensions of size one; None for other views."""
    source = positions.of(node_argument(node))
    if source is None or source.dim is None:
        return None
    before, after = shape_of_node(node_argument(node)), shape_of_node(node)
    dims_before = [i for i, size in enumerate(before) if size != 1]
    dims_after = [i for i, size in enumerate(after) if size != 1]
    if [before[i] for i in dims_before] != [after[i] for i in dims_after] or source.dim not in dims_before:
        return None
    return replace(source, dim=dims_after[dims_before.index(source.dim)])


def _permute(node: fx.Node, positions: Positions) -> Affine | None:
    """Return the affine form after `permute`, `transpose` or `t`: its dimension is at its new place."""
    source = positions.of(node_argument(node))
    if source is None or source.dim is None:
        return None
    rank = len(shape_of_node(node))
    if node.target is aten.permute.default:
        order = [dim % rank for dim in bound_arguments(node)["dims"]]
    else:
        order = list(range(rank))
        is_t = node.target is aten.t.default
        dim0, dim1 = (0, rank - 1) if is_t else (int_argument(node, 1) % rank, int_argument(node, 2) % rank)
        order[dim0], order[dim1] = order[dim1], order[dim0]
    return replace(source, dim=order.index(source.dim))


def _slice(node: fx.Node, positions: Positions) -> Affine | None:
    """Return the affine form of a slice: factor * (step * i + start) + offset if it is along the varying dimension.

    A slice along another dimension keeps the form. None if the start or step is unknown.
    """
    source = positions.of(node_argument(node))
    arguments = bound_arguments(node)
    rank = len(shape_of_node(node))
    if source is None or source.dim is None or source.dim != arguments["dim"] % rank:
        return source
    start, step = positions.integer(arguments["start"] or 0), arguments["step"]
    length = shape_of_node(node_argument(node))[source.dim]
    if start is not None and start < 0:
        start = max(start + length, 0) if isinstance(length, int) else None
    if start is None or not isinstance(step, int):
        return None
    return replace(source, factor=source.factor * step, offset=source.offset + source.factor * start)


def _select(node: fx.Node, positions: Positions) -> Affine | None:
    """Return the affine form of `x.select(dim, index)`: a constant if x varies along `dim`; else x's, without that dimension."""
    source = positions.of(node_argument(node))
    dim, index = int_argument(node, 1) % (len(shape_of_node(node)) + 1), positions.integer(node.args[2])
    if source is None or source.dim is None:
        return None
    if source.dim != dim:
        return replace(source, dim=source.dim - (dim < source.dim))
    length = shape_of_node(node_argument(node))[dim]
    if index is not None and index < 0:
        index = index + length if isinstance(length, int) else None
    return None if index is None else _affine_or_constant(0, source.offset + source.factor * index, None)


def _cat(node: fx.Node, positions: Positions) -> Affine | None:
    """Return the affine form of a concatenation if each operand continues the one before it; else None.

    [0 1 2] and [3 4] along their dimension: factor 1, offset 0.
    """
    arguments, rank = bound_arguments(node), len(shape_of_node(node))
    operands, dim = arguments["tensors"], arguments["dim"] % rank
    forms_or_none = [positions.operand(item, node.meta[VALUE].dtype) for item in operands]
    forms = [form for form in forms_or_none if form is not None]
    if len(forms) < len(operands) or any(len(shape_of_node(operand)) != rank for operand in operands):
        return None
    lengths: list[Size] = [shape_of_node(operand)[dim] for operand in operands]
    factors = {form.factor for form, length in zip(forms, lengths, strict=True) if length != 1 or form.dim == dim}
    if len(factors) > 1 or any(form.dim not in (dim, None) for form in forms):
        return None
    factor = factors.pop() if factors else 0
    offset, rows_before = forms[0].offset, 0
    for form, length in zip(forms[:-1], lengths, strict=False):
        if form.offset != offset + factor * rows_before or not isinstance(length, int):
            return None
        rows_before += length
    if forms[-1].offset != offset + factor * rows_before:
        return None
    return _affine_or_constant(factor, offset, dim)


def _cumsum(node: fx.Node, positions: Positions) -> Affine | None:
    """Return the affine form of the prefix sum of a constant c: c * (i + 1)."""
    arguments = named_arguments(node, frozenset({"self", "dim", "dtype"}))
    constant = None if arguments is None else positions.integer(arguments["self"])
    rank = len(shape_of_node(node))
    return None if constant is None or not rank else _affine_or_constant(constant, constant, int_argument(node, 1) % rank)


def _index(node: fx.Node, positions: Positions) -> Affine | None:
    """Return the affine form of `x[indices]`: x's form, applied to the form of the index along x's varying dimension.

    None if that index may be negative, which counts from the end, if an index is a mask, or if a dimension has no index.
    """
    source, indices = positions.of(node_argument(node)), bound_arguments(node)["indices"]
    if source is None or source.dim is None:
        return None
    index_tensors = [item for item in indices if item is not None]
    if len(index_tensors) != len(shape_of_node(node_argument(node))) or any(
        item.meta[VALUE].dtype not in INDEX_DTYPES for item in index_tensors
    ):
        return None
    tensor = indices[source.dim]
    index = positions.operand(tensor, torch.int64)
    if index is None or index.factor < 0 or index.offset < 0:
        return None
    dim = None if index.dim is None else index.dim + len(shape_of_node(node)) - len(shape_of_node(tensor))
    return _affine_or_constant(source.factor * index.factor, source.offset + source.factor * index.offset, dim)


_RULES: dict[Any, Callable[[fx.Node, Positions], Affine | None]] = {
    **dict.fromkeys(of_kind(Kind.ARANGE), _arange),
    **dict.fromkeys(LINEAR_COMBINATIONS, _sum),
    **dict.fromkeys(of_kind(Kind.MULTIPLY), _product),
    **dict.fromkeys(of_kind(Kind.CAST, Kind.COPY, Kind.ALIAS), _same_as_operand),
    **dict.fromkeys(of_kind(Kind.UNSQUEEZE), _unsqueeze),
    **dict.fromkeys(of_kind(Kind.EXPAND), _expand),
    **dict.fromkeys(of_kind(Kind.RESHAPE, Kind.SQUEEZE), _view),
    **dict.fromkeys(of_kind(Kind.PERMUTE), _permute),
    **dict.fromkeys(of_kind(Kind.SLICE), _slice),
    **dict.fromkeys(of_kind(Kind.SELECT), _select),
    **dict.fromkeys(of_kind(Kind.CONCAT), _cat),
    aten.neg.default: _neg,
    aten.cumsum.default: _cumsum,
    aten.index.Tensor: _index,
}
