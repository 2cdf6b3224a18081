"""What a device's kernels are tried on, once, where we never saw what they make: numbers that are known, and how near is near."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from streamfx.runtime import plain_attention
from streamfx.runtime.plain_attention import Causal

CLOSE = 0.03  # of the largest number: half types have three digits, or two


Forward: TypeAlias = "Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]"
Backward: TypeAlias = "Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]"


class Sizes(NamedTuple):
    """Of queries and of keys (heads, rows), and the width of a head."""

    device: torch.device
    dtype: torch.dtype
    queries: tuple[int, int]
    keys: tuple[int, int]
    width: int


def agree(forward: Forward, backward: Backward, causal: Causal, sizes: Sizes) -> bool:
    """Whether kernels of (q, k, v) and of (gradient, q, k, v, out, lse) give what plain operators give."""
    heads = (sizes.queries, sizes.keys, sizes.keys, sizes.queries)
    query, key, value, gradient = (_known(sizes.device, sizes.dtype, *own, sizes.width) for own in heads)
    try:
        result = forward(query, key, value)
        found = (*result, *backward(gradient, query, key, value, *result))
    except RuntimeError:  # the build has no such kernels
        return False
    truth = plain_attention.forward(query, key, value, None, causal, None)
    gradients = plain_attention.backward(gradient, query, key, value, *truth, None, causal, None)
    return all(map(_is_close, found, (*truth, *gradients)))


def _known(device: torch.device, dtype: torch.dtype, heads: int, rows: int, width: int) -> Tensor:
    """Numbers that no generator is asked for."""
    return torch.arange(heads * rows * width, device=device, dtype=torch.float32).mul_(heads + 0.7).sin_().view(
        1, heads, rows, width
    ).to(dtype)  # fmt: skip


def _is_close(found: Tensor, wanted: Tensor) -> bool:
    found, wanted = found.float(), wanted.float()
    return bool((found - wanted).abs().max() <= CLOSE * wanted.abs().max())
