"""Axis rules of matrix products: a contracted label is summed, so a contraction over the sequence is a sum over chunks.

A rule returns a `Signature`: axis labels (integers) for each dimension of each operand and result; a label of operands alone
is contracted. One in `full_axes(...)` is needed in full: the operator cannot run on a slice of that axis.
"""

from __future__ import annotations

import torch

from streamfx.ir.operator_table import Kind, of_kind
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
    """Axis rule of (matrix [..., n, n], b [..., n, m]) -> x with matrix @ x = b (or x @ matrix = b if not `left`).

    Each index of the leading dimensions is one system; n is needed in full, m is independent. None if ranks differ.
    """
    rank = len(call.shape)
    if any(len(shape) != rank for shape in call.shapes):
        return None
    labels = tuple((i,) for i in range(rank))
    matrix = (*labels[:-2], (rank,), (rank + 1,))
    solved_dim = rank - 2 if call.arguments()["left"] else rank - 1
    return Signature((matrix, labels), (labels,), index=full_axes(solved_dim, rank, rank + 1))


@rule(*of_kind(Kind.ADDMM))
def add_product(call: RuleCall) -> Signature | None:
    """Axis rule of `bias + a @ b`, a [..., m, k] and b [..., k, n]; the bias is broadcast to [..., m, n].

    The contracted label k is marked as needed in full: if it were split into chunks, each chunk would add the bias.
    """
    if len(call.operands) != 3:
        return None
    rank = len(call.shape)
    batch = tuple((label,) for label in range(rank - 2))
    m, n, k = (rank,), (rank + 1,), (rank + 2,)
    result = (*batch, m, n)
    num_missing_dims = rank - len(call.shapes[0])
    bias = tuple(result[num_missing_dims + i] if size != 1 else () for i, size in enumerate(call.shapes[0]))
    return Signature((bias, (*batch, m, k), (*batch, k, n)), (result,), index=full_axes(*k))
