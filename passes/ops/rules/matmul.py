"""Rules of matrix products: a contracted label is summed, so a contraction over the sequence becomes an accumulator."""

from __future__ import annotations

import torch

from streamfx.ir.signature import Signature, full_axes
from streamfx.passes.ops.rules.registry import RuleCall, rule, signatures

aten = torch.ops.aten

signatures(
    {
        aten.mm.default: "m k, k n -> m n",
        aten.bmm.default: "b m k, b k n -> b m n",
        aten.mv.default: "m k, k -> m",
        aten.dot.default: "k, k -> ",
        aten.vdot.default: "k, k -> ",
        aten._cdist_forward.default: "... m k!, ... n k! -> ... m n",
        aten._cdist_backward.default: "... m n, ... m k!, ... n k!, ... m n -> ... m k",
    }
)


@rule(aten.linalg_solve_triangular.default)
def solve_triangular(call: RuleCall) -> Signature | None:
    """Solve one system for each index of the leading dimensions; columns of the right-hand side are independent."""
    rank = len(call.shape)
    if any(len(shape) != rank for shape in call.shapes):
        return None
    letters = tuple((i,) for i in range(rank))
    matrix, other = ((*letters[:-2], (rank,), (rank + 1,)), letters)
    if not call.arguments()["left"]:
        return Signature((matrix, other), (letters,), index=full_axes(rank - 1, rank, rank + 1))
    return Signature((matrix, other), (letters,), index=full_axes(rank - 2, rank, rank + 1))


@rule(aten.addmm.default, aten.baddbmm.default)
def add_product(call: RuleCall) -> Signature | None:
    """`bias + a @ b`: the bias is broadcast to the result and must not be added once per chunk of a sum.

    The contracted label is therefore marked as needed in full, so that it is not split.
    """
    if len(call.operands) != 3:
        return None
    rank = len(call.shape)
    batch = tuple((letter,) for letter in range(rank - 2))
    m, n, k = (rank,), (rank + 1,), (rank + 2,)
    result = (*batch, m, n)
    skipped = rank - len(call.shapes[0])
    bias = tuple(result[skipped + i] if size != 1 else () for i, size in enumerate(call.shapes[0]))
    return Signature((bias, (*batch, m, k), (*batch, k, n)), (result,), index=full_axes(*k))
