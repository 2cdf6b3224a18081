"""Attention of a chunk by streamfx's runtime: beside float64 and eager attention of the same type, and in one call or several."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu.measures import Finding, distance, is_off, seconds
from benchmarks.gpu.place import Place
from streamfx.kernels import chunk_attention, sdpa
from streamfx.kernels.chunk_attention import Window
from streamfx.kernels.mask_programs import Mask, MaskProgram

TYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = ((32, 8, 128), (8, 8, 64), (4, 1, 80), (4, 4, 256))  # heads of queries, heads of keys, width
SMALL_SHAPES = ((4, 2, 16), (2, 2, 8))
ROWS, PASTS = 256, (512, 0, 17, 4096)  # 256 and 512: whole tiles of every kernel
SMALL_ROWS, SMALL_PASTS = 8, (0, 1, 17)
HIDES_ALL = "bias that hides all keys of one row"
WINDOW, LENGTHS = 17, (7, 1, 3, 29)  # keys that a row sees; lengths of documents, over and over
SEEN = ("causal", "all keys", "window", "documents", "documents in windows", "bias", HIDES_ALL)
How = tuple["Tensor | Mask | None", "int | None", "Window | None"]


def against_float64(place: Place) -> Iterator[Finding]:
    """Errors of results and gradients over eager's errors in the same type, for cases that hold every pair of properties."""
    shapes, pasts = (SMALL_SHAPES, SMALL_PASTS) if place.small else (SHAPES, PASTS)
    cases = list(covering(TYPES[:: 2 if place.small else 1], shapes, pasts, SEEN))
    ratios: dict[str, float] = {}
    for dtype, shape, past, kind in cases:
        case = f"{str(dtype)[6:]}, {shape[0]} heads, {shape[1]} of keys, width {shape[2]}, past {past}, {kind}"
        errors = _errors(place, dtype, shape, past, kind)
        off = any(is_off(*pair) for pair in errors.values())
        shares = {name: (own + 1e-9) / (eager + 1e-9) for name, (own, eager) in errors.items()}
        ratios[case] = max(shares.values())
        figures = {**{f"{name} of eager's": share for name, share in shares.items()}, "result": errors["result"][0]}
        yield Finding(case, figures, off, detail=True)
    worst = max(ratios, key=lambda case: ratios[case])
    yield Finding("", {"cases": len(cases), "largest error, of eager's": ratios[worst], "in": worst})


def covering(*choices: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Combinations, one choice of each kind, until all pairs of choices have occurred; each adds as many new pairs as possible.

    >>> len(list(covering("ab", "cd", "ef"))), len(list(covering("ab", "cde")))
    (4, 6)
    """
    whole = list(itertools.product(*choices))

    def pairs(case: tuple[Any, ...]) -> set[object]:
        return set(itertools.combinations(enumerate(case), 2))

    missing = set().union(*map(pairs, whole))
    while missing:
        best = max(whole, key=lambda case: len(pairs(case) & missing))
        missing -= pairs(best)
        yield best


def _errors(
    place: Place, dtype: torch.dtype, shape: tuple[int, int, int], past: int, kind: str
) -> dict[str, tuple[float, float]]:
    """Distances to float64 of the result and of each gradient: ours, and eager's in the same type."""
    heads, groups, width = shape
    rows = SMALL_ROWS if place.small else ROWS
    sizes = ((heads, rows), (groups, past + rows), (groups, past + rows), (heads, rows))
    drawn = [place.random(2, own, count, width, dtype=dtype, seed=seed) for seed, (own, count) in enumerate(sizes)]
    mask = chunk_mask(kind, rows, past, place.device, LENGTHS)
    truth, eager = _eager([item.double() for item in drawn], mask), _eager(drawn, mask)
    ours = both_passes(drawn, how_seen(kind, mask, past, dtype))
    names = ("result", "dq", "dk", "dv")
    return {
        name: (distance(one, exact), distance(other, exact))
        for name, one, other, exact in zip(names, ours, eager, truth, strict=True)
    }


def one_call_against_pieces(place: Place) -> Iterator[Finding]:
    """A chunk of 4,096 rows of documents, the first of which begins long before it, forward and backward."""
    rows, past, lengths = (16, 32, (7, 9)) if place.small else (4096, 28672, (1000, 300, 50, 700))
    heads, groups, width = (4, 2, 16) if place.small else (32, 8, 128)
    query, gradient = (place.random(1, heads, rows, width, seed=seed) for seed in (0, 3))
    key, value = (place.random(1, groups, past + rows, width, seed=seed) for seed in (1, 2))
    at = torch.arange(past + rows, device=place.device)
    document = (at >= past) * _documents(at - past, lengths)
    seen = (at <= at[past:, None]) & (document == document[past:, None])
    mask = mask_of_data(seen, query.dtype)

    def run() -> None:
        both_passes((query, key, value, gradient), (mask, None, None))

    one = seconds(place, run)
    with mock.patch.object(sdpa, "supports_documents", return_value=False):
        several = seconds(place, run)
    yield Finding(f"{rows} rows", {"one call ms": 1e3 * one, "a call for each document ms": 1e3 * several})


def chunk_mask(kind: str, rows: int, past: int, device: str, lengths: Sequence[int]) -> Tensor:
    """Which keys each row of a chunk sees."""
    at = torch.arange(past + rows, device=device)
    own = at[past:, None]
    seen = (at <= own) | torch.tensor(kind == "all keys", device=device)
    if "window" in kind:
        seen &= at > own - WINDOW
    if "documents" in kind:
        document = _documents(at, lengths)
        seen &= document == document[past:, None]
    if "bias" in kind:
        seen &= (own - at) % 5 != 3
    if kind == HIDES_ALL:
        seen[3] = False
    return seen


def _documents(at: Tensor, lengths: Sequence[int]) -> Tensor:
    """The number of the document that each row is of."""
    ends = torch.tensor(lengths, device=at.device).cumsum(0)
    return at // ends[-1] * len(lengths) + torch.bucketize(at % ends[-1], ends, right=True)


def how_seen(kind: str, seen: Tensor, past: int, dtype: torch.dtype) -> How:
    """The mask, the first row's own key, and the window, as `attention.forward` takes them."""
    if kind in ("causal", "window"):
        return None, past, (None if kind == "causal" else 1 - WINDOW, 0)
    if kind == "all keys":
        return None, None, None
    return (mask_of_data(seen, dtype) if "documents" in kind else bias_of(seen, dtype)), None, None


def bias_of(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask [1 1 m n] that is added to scores."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, float("-inf"))[None, None]


def mask_of_data(seen: Tensor, dtype: torch.dtype) -> Mask:
    """A mask whose numbers a loop looks at."""
    graph = torch.fx.Graph()
    graph.output((graph.placeholder("mask"),))
    mask: Mask = MaskProgram(torch.fx.GraphModule(torch.nn.Module(), graph), [None])(bias_of(seen, dtype))
    return mask


def _eager(drawn: Sequence[Tensor], seen: Tensor) -> list[Tensor]:
    """By plain operators, scores of half types in float32; a row that sees nothing has the result 0."""
    *operands, gradient = (item.detach().requires_grad_() for item in drawn)
    q, k, v = operands
    k, v = (item.repeat_interleave(q.shape[1] // item.shape[1], 1) for item in (k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    sees = seen.any(-1, keepdim=True)
    weights = torch.where(sees, scores.masked_fill(~seen, float("-inf")), 0.0).softmax(-1) * sees
    out = weights.to(v.dtype) @ v
    return [out.detach(), *torch.autograd.grad(out, operands, gradient)]


def both_passes(drawn: Sequence[Tensor], how: How) -> list[Tensor]:
    """The runtime's result and gradients, of queries, keys, values and the result's gradient."""
    query, key, value, gradient = drawn
    out, lse = chunk_attention.forward(query, key, value, *how)
    return [out, *chunk_attention.backward(gradient, query, key, value, out, lse, *how)]
