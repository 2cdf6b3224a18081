"""Classify the torch functions that may be recomputed later: pure functions that are cheap relative to their result size.

The tables list functions and methods of Dynamo graphs. The result of an unlisted function is saved, not recomputed.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from enum import Enum
from typing import Any

import torch
from torch import fx
from torch.nn import functional


class OpKind(Enum):
    """How a function treats the dimensions of its operands."""

    POINTWISE = "pointwise"  # the operands broadcast against each other
    SAME = "same"  # the dimensions of the first operand: casts, copies
    INDEX = "index"  # x[...]
    SOFTMAX = "softmax"  # mixes along one dimension
    NORM = "norm"  # mixes along the last dimensions
    REDUCTION = "reduction"  # sums over given dimensions
    LINEAR = "linear"  # contracts the last dimension of the first operand with a weight
    CONTRACTION = "contraction"  # any other matrix product
    VIEW = "view"  # dimensions split, merged, moved
    NUMBER = "number"  # a Python number from a zero-dimensional tensor


NAMES: dict[OpKind, str] = {
    OpKind.POINTWISE: """
        abs add clamp clamp_max clamp_min div divide exp expit gelu log masked_fill maximum minimum mul multiply neg
        negative pow reciprocal relu rsqrt sigmoid silu softplus sqrt square sub subtract tanh true_divide truediv where
    """,
    OpKind.SAME: "bfloat16 clone contiguous detach double float half to type type_as",
    OpKind.INDEX: "getitem",
    OpKind.SOFTMAX: "log_softmax softmax",
    OpKind.NORM: "layer_norm rms_norm",
    OpKind.REDUCTION: "mean std sum var",
    OpKind.LINEAR: "linear matmul",
    OpKind.CONTRACTION: "addmm baddbmm bmm einsum inner mm tensordot",
    OpKind.VIEW: """
        H T adjoint expand flatten mT mH moveaxis movedim narrow permute reshape select squeeze swapaxes swapdims t transpose
        unflatten unsqueeze view view_as
    """,
    OpKind.NUMBER: "item",
}
KINDS: dict[str, OpKind] = {name: kind for kind, names in NAMES.items() for name in names.split()}
ALIASING = frozenset({OpKind.SAME, OpKind.INDEX, OpKind.VIEW})  # the result may be the operand's memory
CONTRACTING = frozenset({OpKind.LINEAR, OpKind.CONTRACTION})


def _functions(names: Iterable[str]) -> dict[Any, OpKind]:
    """Return the functions with these names in torch's modules and in `operator`, each with its kind."""
    homes = (torch, functional, torch.special, torch.linalg, operator)
    return {getattr(home, name): KINDS[name] for name in names for home in homes if callable(getattr(home, name, None))}


def _attribute_operators(*names: str) -> dict[Any, OpKind]:
    """Return the `aten` operators of these names (packets and default overloads), each with the kind `VIEW`.

    Dynamo traces `x.T` as `getattr(x, "T")` up to torch 2.13, and as `aten.numpy_T(x)` later.
    """
    packets = [getattr(torch.ops.aten, name) for name in names]
    return dict.fromkeys([*packets, *(packet.default for packet in packets)], OpKind.VIEW)


FUNCTIONS = _functions(KINDS) | _attribute_operators("numpy_T", "matrix_H", "mT", "mH", "adjoint", "t")
METHODS = frozenset(name for name in KINDS if hasattr(torch.Tensor, name))
ATTRIBUTES = frozenset({"H", "T", "mT", "mH"})


SUMMING_FUNCTIONS = set(
    """addmm baddbmm binary_cross_entropy binary_cross_entropy_with_logits bmm cosine_similarity cross_entropy dot einsum
    huber_loss kl_div l1_loss linear log_softmax logsumexp matmul mean mm mse_loss nanmean nansum nll_loss norm smooth_l1_loss
    softmax std sum var vector_norm""".split()  # noqa: SIM905  (as the table above)
)


def sums_elements(node: fx.Node) -> bool:
    """Return whether a node calls a function that sums products or elements, so that the result shows no single one of them.

    Only norms of order 1 and 2 are sums.
    """
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if node.op not in ("call_function", "call_method") or name not in SUMMING_FUNCTIONS:
        return False
    orders = [item for item in (*node.args[1:], *node.kwargs.values()) if isinstance(item, (int, float))]
    return not name.endswith("norm") or all(order in (1, 2) for order in orders)  # the infinity norm is the largest element


def op_kind(node: fx.Node) -> OpKind | None:
    """Return the kind of the listed function, method or attribute that a node calls.

    None for any other node, and for calls that write into an argument (`out=`, `inplace=True`).
    """
    if "out" in node.kwargs or node.kwargs.get("inplace", False):
        return None
    if node.op == "call_method":
        return KINDS[str(node.target)] if node.target in METHODS else None
    if node.op != "call_function":
        return None
    if node.target is getattr:
        return KINDS[str(node.args[1])] if node.args[1] in ATTRIBUTES else None
    if node.target in FUNCTIONS:
        return FUNCTIONS[node.target]
    return None
