"""Determine each element (c, z) of a matrix of weights in a Dynamo graph from its chain of operators.

A chain starts from its *source* x, a tensor with rows c, and adds columns z:

    expand(x[..., None])              repeated    x[c]
    masked_fill(.., ~tril(-1), 0)     strict      x[c] below the diagonal, else 0
    cumsum over c                     totals      x[z + 1] + ... + x[c], on and below the diagonal
    masked_fill(.., ~tril(0), -inf)   hidden      the same, and -inf above the diagonal
    exp                               weights     exp of it, and 0 above the diagonal

or, for the totals, `cumsum(x)[c] - cumsum(x)[z]`. A mask with another diagonal is not matched. A `Formula` describes one
value: the kind (middle column), the source, and for each dimension of the value the dimension of the source that it is,
`COLUMN` for z, or None for size one. Each `_match_...` function returns the `Formula` of a call's result, or None if the call
does not match; it reads the formulas of the operands by `reader.formula`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from math import inf
from typing import Any, TypeAlias

import torch
from torch import fx

from streamfx.frontend.combine_fn import is_plain_tensor
from streamfx.ir.sizes import Size, shape_of
from streamfx.node_meta import EXAMPLE_VALUE
from streamfx.torch_private.vmapped import PAD

COLUMN = -1  # the column dimension z, which the source does not have
SourceDim: TypeAlias = "int | None"  # a dimension of the source, or COLUMN; None for a dimension of size one


class FormulaKind(Enum):
    SOURCE = "the source itself"
    RUNNING_SUM = "its running sum"
    REPEATED = "the same for each column"
    STRICT = "nothing on and above the diagonal"
    TOTALS = "sums of rows from z + 1 to c, where z <= c"
    HIDDEN = "totals, and minus infinity above the diagonal"
    EXP_TOTALS = "exp of totals"
    WEIGHTS = "exp of totals, and zero above the diagonal"


@dataclass(frozen=True)
class Formula:
    """The formula of a value in terms of its `source`; `row_dim` is the row dimension of the source.

    `dims` has the `SourceDim` of each dimension of the value.
    """

    kind: FormulaKind
    source: fx.Node
    dims: tuple[SourceDim, ...]
    row_dim: int | None = None

    @property
    def has_last_square(self) -> bool:
        """Return whether the last two dimensions are rows and columns, to which masks and triangles apply."""
        return len(self.dims) > 1 and self.dims[-2] == self.row_dim and self.dims[-1] == COLUMN


@dataclass(frozen=True)
class Triangle:
    """A boolean mask of the last two dimensions: True where c - z >= `min_offset`, or its complement if not `inside`."""

    min_offset: int
    inside: bool


@dataclass
class FormulaReader:
    """Matches values of a Dynamo graph; `matched` collects the matched operators."""

    matched: set[fx.Node] = field(default_factory=set)

    def formula(self, node: fx.Node) -> Formula:
        """Return the formula of a node's value; if no rule matches the node, its value is the source of a new chain.

        Operators of the chain are added to `self.matched`.
        """
        rule = _RULES.get(call_name(node)) if isinstance(_first_operand(node), fx.Node) else None  # not of `1 - x`
        matched_formula = rule(self, node) if rule is not None and all(map(_is_tensor_or_size, node.all_input_nodes)) else None
        if matched_formula is not None:
            self.matched.add(node)
            return matched_formula
        return Formula(FormulaKind.SOURCE, node, tuple(range(node.meta[EXAMPLE_VALUE].dim())))

    def triangle(self, node: Any) -> Triangle | None:
        """Return the triangle of (c, z) in which a boolean mask is True, such as c - z >= 0; None if the mask is not a triangle.

        Matches `tril` and `triu` of ones, their casts to bool, and complements; their operators are added to `self.matched`.
        """
        name = call_name(node)
        if name == "logical_not" or (name == "invert" and node.meta[EXAMPLE_VALUE].dtype == torch.bool):
            inner = self.triangle(node.args[0])
            triangle = None if inner is None else replace(inner, inside=not inner.inside)
        elif name in ("tril", "triu"):
            triangle = self._triangle_of_ones(node)
        elif name in ("bool", "to") and node.meta[EXAMPLE_VALUE].dtype == torch.bool:
            triangle = self.triangle(node.args[0])
        else:
            triangle = None
        if triangle is not None:
            self.matched.add(node)
        return triangle

    def _triangle_of_ones(self, node: fx.Node) -> Triangle | None:
        """Return the triangle of `tril(ones)` or `triu(ones)`; None for another operand. The ones are added to `self.matched`."""
        arguments = arguments_of(node, "input", "diagonal")
        if arguments is None or call_name(arguments["input"]) != "ones":
            return None
        self.matched.add(arguments["input"])
        return _triangle_of(node, arguments)


def _triangle_of(node: fx.Node, arguments: dict[str, Any]) -> Triangle | None:
    """Return the elements (c, z) that `tril` keeps (z - c <= diagonal) or `triu` keeps (z - c >= diagonal).

    None if the diagonal is not an integer.
    """
    diagonal = arguments.get("diagonal", 0)
    if type(diagonal) is not int:
        return None
    return Triangle(-diagonal, True) if call_name(node) == "tril" else Triangle(1 - diagonal, False)


def _is_tensor_or_size(node: fx.Node) -> bool:
    """Return whether a node is a plain tensor or a symbolic size."""
    return is_plain_tensor(node) or isinstance(node.meta.get(EXAMPLE_VALUE), torch.SymInt)


# -- calls


_FUNCTIONS: dict[Any, str] = {
    operator.getitem: "getitem",
    operator.invert: "invert",
    operator.sub: "sub",
    operator.matmul: "matmul",
    torch.nn.functional.pad: "pad",
    PAD: "pad",
    **{
        getattr(torch, name): name
        for name in (
            *("bmm", "cat", "cumsum", "einsum", "exp", "logical_not", "masked_fill", "matmul", "ones", "permute", "sub"),
            *("swapaxes", "transpose", "tril", "triu", "unsqueeze", "where", "zeros", "zeros_like"),
        )
    },
}


def call_name(node: Any) -> str:
    """Return the name of a call of a torch function or tensor method, such as "cumsum"; "" for anything else."""
    if not isinstance(node, fx.Node):
        return ""
    if node.op == "call_method":
        return str(node.target) if isinstance(node.args[0], fx.Node) and is_plain_tensor(node.args[0]) else ""
    return _FUNCTIONS.get(node.target, "") if node.op == "call_function" else ""


def arguments_of(node: fx.Node, *names: str) -> dict[str, Any] | None:
    """Return the arguments of a call by name, where `names` are its parameters in order.

    An argument that the call omits is missing. None if the call has further arguments that are not None.
    """
    if len(node.args) > len(names):
        return None
    arguments = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    if "self" in arguments and names[0] == "input":
        arguments["input"] = arguments.pop("self")
    return None if any(name not in names and value is not None for name, value in arguments.items()) else arguments


def _first_operand(node: fx.Node) -> Any:
    """Return the first operand of a call, positional or by keyword; None if it has none."""
    return node.args[0] if node.args else node.kwargs.get("input", node.kwargs.get("self"))


def _dim(value: Any, rank: int) -> int | None:
    """Return a dimension counted from the front (-1 -> rank - 1); None if `value` is not a valid dimension."""
    return value % rank if type(value) is int and -rank <= value < rank else None


# -- operators that move no element to another (c, z)
# Each function returns the formula of the call's result; None if the call does not match.


def _match_permute(reader: FormulaReader, node: fx.Node) -> Formula | None:
    """Match `permute`: the dimensions of the operand's formula in another order."""
    if node.kwargs:
        return None
    formula = reader.formula(node.args[0])  # type: ignore[arg-type]
    dims = node.args[1:] if len(node.args) > 2 or isinstance(node.args[-1], int) else node.args[1]
    order = [_dim(dim, len(formula.dims)) for dim in dims]  # type: ignore[union-attr]
    if None in order:
        return None
    return replace(formula, dims=tuple(formula.dims[dim] for dim in order))  # type: ignore[index]


def _match_transpose(reader: FormulaReader, node: fx.Node) -> Formula | None:
    """Match `transpose`: the operand's formula with two dimensions exchanged."""
    arguments = arguments_of(node, "input", "dim0", "dim1")
    if arguments is None:
        return None
    formula = reader.formula(arguments["input"])
    dim0, dim1 = (_dim(arguments.get(name), len(formula.dims)) for name in ("dim0", "dim1"))
    if dim0 is None or dim1 is None:
        return None
    dims = list(formula.dims)
    dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return replace(formula, dims=tuple(dims))


def _match_unsqueeze(reader: FormulaReader, node: fx.Node) -> Formula | None:
    """Match `unsqueeze`: the operand's formula with a new dimension of size one (None)."""
    arguments = arguments_of(node, "input", "dim")
    if arguments is None:
        return None
    formula = reader.formula(arguments["input"])
    dim = _dim(arguments.get("dim"), len(formula.dims) + 1)
    return None if dim is None else replace(formula, dims=(*formula.dims[:dim], None, *formula.dims[dim:]))


def _match_index(reader: FormulaReader, node: fx.Node) -> Formula | None:
    """Match indexing that only adds dimensions of size one (None in the formula): x[..., None], x[:, None, :]."""
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    formula = reader.formula(node.args[0])  # type: ignore[arg-type]
    num_slices = sum(entry == slice(None) for entry in index if isinstance(entry, slice))
    if index.count(...) > 1 or not all(entry is None or entry is ... or entry == slice(None) for entry in index):
        return None
    remaining, dims = list(formula.dims), list[SourceDim]()
    for entry in index:
        if entry is None:
            dims.append(None)
            continue
        num_dims = len(formula.dims) - num_slices if entry is ... else 1
        dims += remaining[:num_dims]
        del remaining[:num_dims]
    return replace(formula, dims=(*dims, *remaining))


def _match_expand(reader: FormulaReader, node: fx.Node) -> Formula | None:
    """Match `expand`: a repetition along a new dimension of size one, which becomes the column z."""
    return _with_column(reader.formula(node.args[0]), node)  # type: ignore[arg-type]


def _with_column(formula: Formula, node: fx.Node) -> Formula | None:
    """Return the formula of an operand after it is broadcast to the shape of `node`; None if that is not a matched repetition.

    Only a source may be repeated, along one dimension of size one, which becomes the column z: x[c] -> repeated x[c]. If nothing
    is repeated, the formula is unchanged.
    """
    shape, source_shape = shape_of(node.meta[EXAMPLE_VALUE]), shape_of(formula.source.meta[EXAMPLE_VALUE])
    if len(shape) != len(formula.dims) or any(source_shape[dim] != size for dim, size in _source_dims(formula.dims, shape)):
        return None
    repeated = [i for i, (dim, size) in enumerate(zip(formula.dims, shape, strict=True)) if dim is None and size != 1]
    if not repeated:
        return formula
    if formula.kind is not FormulaKind.SOURCE or len(repeated) > 1:
        return None
    return replace(
        formula, kind=FormulaKind.REPEATED, dims=tuple(COLUMN if i in repeated else dim for i, dim in enumerate(formula.dims))
    )


def _source_dims(dims: tuple[SourceDim, ...], shape: tuple[Size, ...]) -> Iterator[tuple[int, Size]]:
    """Return pairs (dimension of the source, its size in the value) for each dimension of a value that the source has.

    `dims` are the dimensions of the value's `Formula`, `shape` is its shape.
    """
    return ((dim, size) for dim, size in zip(dims, shape, strict=True) if dim is not None and dim != COLUMN)


# -- operators that change the kind of a formula


def _match_masked_fill(reader: FormulaReader, node: fx.Node) -> Formula | None:
    """Match masked_fill(x, mask, number) whose mask is True where c - z < an offset, the complement of a triangle."""
    arguments = arguments_of(node, "input", "mask", "value")
    triangle = None if arguments is None else reader.triangle(arguments["mask"])
    if arguments is None or triangle is None or triangle.inside:
        return None
    return _match_fill_above(reader, node, arguments["input"], triangle.min_offset, arguments["value"], arguments["mask"])


def _match_where(reader: FormulaReader, node: fx.Node) -> Formula | None:
    """Match where(triangle c - z >= offset, x, number)."""
    arguments = arguments_of(node, "condition", "input", "other")
    triangle = None if arguments is None or len(arguments) != 3 else reader.triangle(arguments["condition"])
    if arguments is None or triangle is None or not triangle.inside or not isinstance(arguments["input"], fx.Node):
        return None
    return _match_fill_above(reader, node, arguments["input"], triangle.min_offset, arguments["other"], arguments["condition"])


def _match_tril(reader: FormulaReader, node: fx.Node) -> Formula | None:
    """Match `tril(x, diagonal)`, which replaces the elements above a diagonal by zero."""
    arguments = arguments_of(node, "input", "diagonal")
    triangle = None if arguments is None else _triangle_of(node, arguments)
    return (
        None
        if arguments is None or triangle is None
        else _match_fill_above(reader, node, arguments["input"], triangle.min_offset, 0, node)
    )


EXP_UNDERFLOW = -1000.0  # its exp is zero in every dtype
_KINDS_AFTER_FILL = {  # by kind, the smallest c - z that is kept, and the fill value elsewhere
    (FormulaKind.REPEATED, 1, 0.0): FormulaKind.STRICT,
    (FormulaKind.TOTALS, 0, -inf): FormulaKind.HIDDEN,
    (FormulaKind.EXP_TOTALS, 0, 0.0): FormulaKind.WEIGHTS,
}


def _match_fill_above(
    reader: FormulaReader, node: fx.Node, filled: fx.Node, min_offset: int, value: Any, mask: fx.Node
) -> Formula | None:
    """Match the replacement of all elements with c - z < `min_offset` by the number `value`.

    `node` is the call, `filled` its operand, which is broadcast to the result's shape, and `mask` its mask (for `tril`, the
    call). The last two dimensions must be rows c and columns z, equally many. `_KINDS_AFTER_FILL` says which fills match, for
    example totals, filled with minus infinity above the diagonal -> hidden.
    """
    formula = _with_column(reader.formula(filled), node)
    if formula is None or not isinstance(value, (int, float)) or len(formula.dims) < 2:
        return None
    if formula.kind is FormulaKind.REPEATED:
        formula = replace(formula, row_dim=formula.dims[-2])
    square_sizes, mask_sizes = shape_of(node.meta[EXAMPLE_VALUE])[-2:], shape_of(mask.meta[EXAMPLE_VALUE])
    fill_value = -inf if value <= EXP_UNDERFLOW else float(value)  # such a number has the exp of minus infinity: zero
    kind = _KINDS_AFTER_FILL.get((formula.kind, min_offset, fill_value))
    if kind is None or not formula.has_last_square or square_sizes[0] != square_sizes[1] or mask_sizes[-2:] != square_sizes:
        return None
    return replace(formula, kind=kind) if mask is node or all(size == 1 for size in mask_sizes[:-2]) else None


def _match_cumsum(reader: FormulaReader, node: fx.Node) -> Formula | None:
    """Match `cumsum` over rows c: a source x becomes its running sum, strict values become totals."""
    arguments = arguments_of(node, "input", "dim")
    formula = None if arguments is None else reader.formula(arguments["input"])
    dim = None if arguments is None or formula is None else _dim(arguments.get("dim"), len(formula.dims))
    if formula is None or dim is None or formula.dims[dim] in (None, COLUMN):
        return None
    if formula.kind is FormulaKind.SOURCE:
        return replace(formula, kind=FormulaKind.RUNNING_SUM, row_dim=formula.dims[dim])
    is_total = formula.kind is FormulaKind.STRICT and formula.dims[dim] == formula.row_dim
    return replace(formula, kind=FormulaKind.TOTALS) if is_total else None


def _match_difference(reader: FormulaReader, node: fx.Node) -> Formula | None:
    """Match cumsum(x)[c] - cumsum(x)[z] -> totals, where each operand has size one in the other's dimension of rows."""
    arguments = arguments_of(node, "input", "other")
    if arguments is None or not isinstance(arguments.get("other"), fx.Node) or not is_plain_tensor(arguments["other"]):
        return None
    left, right = reader.formula(arguments["input"]), reader.formula(arguments["other"])
    if {left.kind, right.kind} != {FormulaKind.RUNNING_SUM} or (left.source, left.row_dim) != (right.source, right.row_dim):
        return None
    if len(left.dims) != len(right.dims):
        return None
    pairs = [*zip(left.dims, right.dims, strict=True)]
    if pairs.count((left.row_dim, None)) != 1 or pairs.count((None, left.row_dim)) != 1:
        return None
    if any(a != b for a, b in pairs if (a, b) not in ((left.row_dim, None), (None, left.row_dim))):
        return None
    return replace(left, kind=FormulaKind.TOTALS, dims=tuple(COLUMN if a is None and b is not None else a for a, b in pairs))


def _match_exp(reader: FormulaReader, node: fx.Node) -> Formula | None:
    """Match `exp`: hidden -> weights, totals -> exp of totals."""
    formula = reader.formula(_first_operand(node))
    exp_of = {FormulaKind.HIDDEN: FormulaKind.WEIGHTS, FormulaKind.TOTALS: FormulaKind.EXP_TOTALS}
    return (
        replace(formula, kind=exp_of[formula.kind]) if formula.kind in exp_of and len(node.args) + len(node.kwargs) == 1 else None
    )


_RULES: dict[str, Callable[[FormulaReader, fx.Node], Formula | None]] = {
    "permute": _match_permute,
    "transpose": _match_transpose,
    "swapaxes": _match_transpose,
    "unsqueeze": _match_unsqueeze,
    "getitem": _match_index,
    "expand": _match_expand,
    "masked_fill": _match_masked_fill,
    "where": _match_where,
    "tril": _match_tril,
    "cumsum": _match_cumsum,
    "sub": _match_difference,
    "exp": _match_exp,
}
