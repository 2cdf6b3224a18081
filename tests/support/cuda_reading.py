"""How stand-ins for CUDA's kernels read memory and write it, and their arithmetic: see `cuda_kernels.py`."""

from typing import Any

import torch
from torch import Tensor

HALF = {torch.float16, torch.bfloat16}
SINGLE = {torch.float32}


# -- the arithmetic


def plain(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float | None, last: bool = False, left: int = -1
) -> tuple[Any, Any]:
    """Result and log-sum-exp, in the latter's precision; `last` aligns the causal mask at the last row and key, and a window that
    shows `left` keys before each row's own, if that is not negative.
    """
    given = q.dtype
    q, k, v = (item.to(lse_type(q)) for item in (q, k, v))
    k, v = (item.repeat_interleave(q.shape[1] // item.shape[1], 1) for item in (k, v))
    scores = scores_of(q, k, bias, causal, scale, last, left)
    lse = scores.logsumexp(-1)
    return ((scores - lse.unsqueeze(-1)).exp() @ v).to(given), lse


def scores_of(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float | None, last: bool, left: int = -1) -> Tensor:
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if bias is None else scores + bias
    if not causal:
        return scores
    past, all_pairs = (k.shape[2] - q.shape[2]) * last, torch.ones_like(scores, dtype=torch.bool)
    hidden = all_pairs.triu(1 + past)
    hidden = hidden | all_pairs.tril(past - left - 1) if left >= 0 else hidden
    return scores.masked_fill(hidden, float("-inf"))


def gradients(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Any, causal: bool, scale: Any, last: bool = False,
    left: int = -1,
) -> Any:  # fmt: skip
    given = q.dtype
    g, q, k, v, out = (item.to(lse_type(q)) for item in (g, q, k, v, out))
    groups, each = k.shape[1], q.shape[1] // k.shape[1]
    key, value = (item.repeat_interleave(each, 1) for item in (k, v))
    weights = (scores_of(q, key, bias, causal, scale, last, left) - lse.unsqueeze(-1)).exp()
    inner = weights * (g @ value.transpose(-1, -2) - (g * out).sum(-1, keepdim=True))
    inner = inner * (q.shape[-1] ** -0.5 if scale is None else scale)
    dk, dv = inner.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ g
    dk, dv = (item.unflatten(1, (groups, each)).sum(2) for item in (dk, dv))
    return (inner @ key).to(given), dk.to(given), dv.to(given)


# -- how kernels read and write


def read(tensor: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """What lies at a tensor's pointer."""
    return tensor.as_strided(shape, strides, tensor.storage_offset())


def like(tensor: Tensor, values: Tensor) -> Tensor:
    """at::empty_like of a tensor [b h m d] that is passed as [b m h d]: with the tensor's own layout, if it is dense."""
    return torch.empty_like(tensor.transpose(1, 2)).copy_(values.transpose(1, 2)).transpose(1, 2)


def by_rows(values: Tensor) -> Tensor:
    """at::empty of [b m h d]."""
    return values.transpose(1, 2).contiguous().transpose(1, 2)


def check_heads(q: Tensor, k: Tensor, v: Tensor, types: set[torch.dtype], alignment: int) -> None:
    assert q.dtype in types and k.dtype == v.dtype == q.dtype
    assert q.shape[0] == k.shape[0] == v.shape[0] and q.shape[3] == k.shape[3] and k.shape[1:3] == v.shape[1:3]
    for item in (q, k, v):
        assert item.stride(-1) == 1, "last dimension must be contiguous"
        assert item.shape[-1] % alignment == 0 and all(stride % alignment == 0 for stride in item.stride()[:-1])
        assert is_aligned(item, alignment)


def is_aligned(tensor: Tensor, alignment: int) -> bool:
    return tensor.data_ptr() % (alignment * tensor.element_size()) == 0


def lse_type(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)  # lse_scalar_t is float in all kernels
