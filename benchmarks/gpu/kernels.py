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
from streamfx.runtime.attention import Window
from streamfx.runtime.mask_programs import Mask, MaskProgram

PASTS = (0, 1, 17, 4096)
HIDES_ALL = "bias that hides all from a row"
WINDOW, LENGTHS = 17, (7, 1, 3, 29)  # keys that a row sees; rows of documents, over and over
SEEN = ("causal", "window", "documents", "documents in windows", "bias", HIDES_ALL)


def against_float64(place: Place) -> Iterator[Finding]:
    """Results and gradients of a chunk with a past, beside those of eager's own attention over all keys, in the same type."""
    types = (torch.bfloat16,) if place.small else (torch.bfloat16, torch.float16, torch.float32)
    shapes = ((4, 2, 16),) if place.small else ((8, 8, 64), (8, 2, 128), (4, 1, 80), (4, 4, 256))
    rows, pasts = (8, PASTS[:3]) if place.small else (200, PASTS)
    for dtype, shape, past, kind in itertools.product(types, shapes, pasts, SEEN):
        case = f"{str(dtype)[6:]}, {shape[0]} heads, {shape[1]} of keys, width {shape[2]}, past {past}, {kind}"
        heads, groups, width = shape
        sizes = ((heads, rows), (groups, past + rows), (groups, past + rows), (heads, rows))
        query, key, value, gradient = drawn = [
            place.random(2, h, n, width, dtype=dtype, seed=i) for i, (h, n) in enumerate(sizes)
        ]
        mask = _mask(kind, rows, past, place.device)
        truth = _eager([item.double() for item in drawn], mask)
        eager = _eager(drawn, mask)
        ours = _ours(query, key, value, gradient, *_how(kind, mask, past, dtype))
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
            _ours(query, key, value, g, None, past, (None, 0))

        one = seconds(place, run)
        with mock.patch.object(kernels, "aligns_last", return_value=False):
            two = seconds(place, run)
        yield Finding(f"{rows} rows behind {past}", "seconds of one call, beside two", one, two)


def one_call_against_pieces(place: Place) -> Iterator[Finding]:
    """Of a chunk of 4,096 rows of documents, of which the first begins long before: forward and backward."""
    rows, past, lengths = (16, 32, (7, 9)) if place.small else (4096, 28672, (1000, 300, 50, 700))
    heads, groups, width = (4, 2, 16) if place.small else (32, 8, 128)
    query, gradient = (place.random(1, heads, rows, width, seed=i) for i in (0, 3))
    key, value = (place.random(1, groups, past + rows, width, seed=i) for i in (1, 2))
    at = torch.arange(past + rows, device=place.device)
    document = (at >= past) * _documents(at - past, lengths)
    seen = (at <= at[past:, None]) & (document == document[past:, None])
    mask = _of_data(seen, query.dtype)

    def run() -> None:
        _ours(query, key, value, gradient, mask, None, None)

    one = seconds(place, run)
    with mock.patch.object(kernels, "takes_documents", return_value=False):
        yield Finding(f"{rows} rows of documents", "seconds of one call, beside several", one, seconds(place, run))


def _mask(kind: str, rows: int, past: int, device: str) -> Tensor:
    """Which keys each row sees."""
    at = torch.arange(past + rows, device=device)
    own = at[past:, None]
    seen = at <= own
    if "window" in kind:
        seen &= at > own - WINDOW
    if "documents" in kind:
        document = _documents(at, LENGTHS)
        seen &= document == document[past:, None]
    if "bias" in kind:
        seen &= (own - at) % 5 != 3
    if kind == HIDES_ALL:
        seen[3] = False
    return seen


def _documents(at: Tensor, lengths: Sequence[int]) -> Tensor:
    """The number of the document that a row is of."""
    ends = torch.tensor(lengths, device=at.device).cumsum(0)
    return at // ends[-1] * len(lengths) + torch.bucketize(at % ends[-1], ends, right=True)


def _how(kind: str, seen: Tensor, past: int, dtype: torch.dtype) -> tuple[Tensor | Mask | None, int | None, Window | None]:
    """A mask, or how rows lie among the keys and what they see of these."""
    if kind in ("causal", "window"):
        return None, past, (None if kind == "causal" else 1 - WINDOW, 0)
    if "documents" in kind:
        return _of_data(seen, dtype), None, None
    return _bias(seen, dtype), None, None


def _bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, float("-inf"))[None, None]


def _of_data(seen: Tensor, dtype: torch.dtype) -> Mask:
    """A mask whose numbers a loop looks at."""
    graph = torch.fx.Graph()
    graph.output((graph.placeholder("mask"),))
    mask: Mask = MaskProgram(torch.fx.GraphModule(torch.nn.Module(), graph), [None])(_bias(seen, dtype))
    return mask


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


def _ours(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gradient: Tensor,
    mask: Tensor | Mask | None,
    first: int | None,
    window: Window | None,
) -> list[Tensor]:
    out, lse = attention.forward(query, key, value, mask, first, window)
    return [out, *attention.backward(gradient, query, key, value, out, lse, mask, first, window)]
