"""Attention of a chunk by the device's kernels: exact, and in one call or two."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu import Finding, Place
from benchmarks.gpu.measures import distance, seconds
from streamfx.runtime import attention, kernels

PASTS = (0, 1, 17, 4096)
BIASES = ("causal", "bias", "bias that hides all from a row")


def against_float64(place: Place) -> Iterator[Finding]:
    """Results and gradients of a chunk with a past, beside those of eager's own attention over all keys, in the same type."""
    types = (torch.bfloat16,) if place.small else (torch.bfloat16, torch.float16, torch.float32)
    shapes = ((4, 2, 16),) if place.small else ((8, 8, 64), (8, 2, 128), (4, 1, 80), (4, 4, 256))
    rows, pasts = (8, PASTS[:3]) if place.small else (200, PASTS)
    for dtype, shape, past, bias in itertools.product(types, shapes, pasts, BIASES):
        case = f"{str(dtype)[6:]}, {shape[0]} heads, {shape[1]} of keys, width {shape[2]}, past {past}, {bias}"
        heads, groups, width = shape
        sizes = ((heads, rows), (groups, past + rows), (groups, past + rows), (heads, rows))
        query, key, value, gradient = drawn = [
            place.random(2, h, n, width, dtype=dtype, seed=i) for i, (h, n) in enumerate(sizes)
        ]
        mask = _mask(bias, rows, past, place.device)
        truth = _eager([item.double() for item in drawn], mask)
        eager = _eager(drawn, mask)
        ours = _ours(query, key, value, gradient, None if bias == "causal" else mask, past)
        for name, one, other, exact in zip(("result", "dq", "dk", "dv"), ours, eager, truth, strict=True):
            yield Finding(case, f"{name}: distance to float64, beside eager's", distance(one, exact), distance(other, exact))


def one_call_against_two(place: Place) -> Iterator[Finding]:
    """Of a chunk of 4,096 rows in the middle of a sequence: forward and backward."""
    rows, pasts, heads, groups, width = (16, (16, 64), 4, 2, 16) if place.small else (4096, (4096, 28672), 32, 8, 128)
    for past in pasts:
        query = place.random(1, heads, rows, width)
        key, value = (place.random(1, groups, past + rows, width, seed=i) for i in (1, 2))
        gradient = place.random(1, heads, rows, width, seed=3)

        def run(query: Tensor = query, key: Tensor = key, value: Tensor = value, g: Tensor = gradient, past: int = past) -> None:
            _ours_of(query, key, value, g, None, past)

        one = seconds(place, run)
        with mock.patch.object(kernels, "aligns_last", return_value=False):
            two = seconds(place, run)
        yield Finding(f"{rows} rows behind {past}", "seconds of one call, beside two", one, two)


def _mask(kind: str, rows: int, past: int, device: str) -> Tensor:
    at = torch.arange(past + rows, device=device)
    seen = at <= at[past:, None]
    if kind != "causal":
        seen &= (at[past:, None] - at) % 5 != 3
    if kind == BIASES[2]:
        seen[3] = False
    return seen


def _eager(drawn: Sequence[Tensor], seen: Tensor) -> list[Tensor]:
    """By plain operators; a row that sees nothing has the result 0."""
    *operands, gradient = (item.detach().requires_grad_() for item in drawn)
    q, k, v = operands
    k, v = (item.repeat_interleave(q.shape[1] // item.shape[1], 1) for item in (k, v))
    scores = (
        (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).float() if q.dtype != torch.float64 else q @ k.mT * q.shape[-1] ** -0.5
    )
    shown = scores.masked_fill(~seen, float("-inf"))
    weights = torch.where(seen.any(-1, keepdim=True), shown, 0.0).softmax(-1) * seen.any(-1, keepdim=True)
    out = weights.to(v.dtype) @ v
    return [out.detach(), *torch.autograd.grad(out, operands, gradient)]


def _ours(query: Tensor, key: Tensor, value: Tensor, gradient: Tensor, seen: Tensor | None, past: int) -> list[Tensor]:
    bias = None
    if seen is not None:
        bias = torch.zeros(seen.shape, dtype=query.dtype, device=query.device).masked_fill(~seen, float("-inf"))[None, None]
    return _ours_of(query, key, value, gradient, bias, past)


def _ours_of(query: Tensor, key: Tensor, value: Tensor, gradient: Tensor, bias: Tensor | None, past: int) -> list[Tensor]:
    seen = (bias, past, (None, 0) if bias is None else None)
    out, lse = attention.forward(query, key, value, *seen)
    return [out, *attention.backward(gradient, query, key, value, out, lse, *seen)]
