"""Packed documents on CUDA, without a CUDA device: one call of flash attention for all that a chunk has of them.

A stand-in with the kernel's contract runs in its place (`tests/support/cuda_documents.py`).
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from streamfx.kernels import chunk_attention, cuda_attention, flash_varlen, flash_window, plain_attention
from streamfx.kernels.mask_tiles import TileKind, tiles_of_mask
from tests.support import cuda_documents as stand_in
from tests.support.calls import noted
from tests.support.cuda_kernels import Heads, another_gradient, drawn, in_their_place, refuses, wrong
from tests.support.cuda_kernels import check as compared
from tests.support.tracing import compare_function
from tests.test_visible import as_mask

HEAD, CPU = 8, torch.device("cpu")
INF = float("inf")
Call = tuple[int, int]  # rows, and documents


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Call]]:
    """Forward calls of the kernel; float64 represents a half type."""
    with in_their_place(half=True):
        flash_varlen.separates_documents(CPU, torch.float64, HEAD)
        yield noted(monkeypatch, stand_in, "flash", lambda q, k, v, rows, *_: (len(q), len(rows) - 1))


def seen_by(starts: list[int], length: int, left: int | None = None, causal: bool = True) -> Tensor:
    """The keys that rows of one sequence see: of their own document, none later, and at most `left` earlier."""
    at = torch.arange(length)
    document = (at[:, None] >= torch.tensor(starts)).sum(1)
    seen = document == document[:, None]
    seen &= (at <= at[:, None]) | (not causal)
    return seen if left is None else seen & (at >= at[:, None] - left)


def bias_of(*seen: Tensor) -> Tensor:
    stacked = torch.stack(seen)[:, None]
    return torch.zeros(stacked.shape, dtype=torch.float64).masked_fill(~stacked, -INF)


def check(heads: Heads, mask: Tensor) -> None:
    """Attention by the mask's pieces is attention."""
    compared(chunk_attention, heads, (as_mask(mask), None, None), (mask, False, None))


def check_mask(mask: Tensor, groups: int = 2) -> None:
    batch, _, rows, keys = mask.shape
    check(drawn(batch, rows, keys, groups=groups), mask)


STARTS = [0, 20, 21, 22, 30, 61]
LENGTH = 67
BATCHES: dict[str, list[Tensor]] = {
    "a window": [seen_by(STARTS, LENGTH, left=5)],
    "both ways": [seen_by(STARTS, LENGTH, causal=False)],
    "other documents in each sequence": [seen_by(STARTS, LENGTH), seen_by([0, 3], LENGTH), seen_by(STARTS, LENGTH)],
}


@pytest.mark.parametrize(("name", "groups"), zip(BATCHES, (2, 4, 2), strict=True))
def test_documents_stream(name: str, groups: int, calls: list[Call]) -> None:
    """Gradients are eager's, in chunks of every size."""

    def function(x: Tensor, seen: Tensor) -> Tensor:
        mask = torch.zeros(seen.shape, dtype=x.dtype).masked_fill(~seen, -INF)
        q, k, v = x.unflatten(-1, (-1, HEAD)).transpose(1, 2).split((4, groups, groups), 1)
        out = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        return (out * torch.linspace(0.5, 1.5, HEAD, dtype=x.dtype)).pow(2).sum()

    torch.manual_seed(0)
    seen = torch.stack(BATCHES[name])[:, None]
    x = torch.randn(len(seen), LENGTH, (4 + 2 * groups) * HEAD, dtype=torch.float64, requires_grad=True)
    compare_function(function, [x, seen], (7, 1, 16, LENGTH), streams=True)
    assert calls


CALLS = {16: [16, 16], 20: [20, 7], 35: [35, 32], LENGTH: [LENGTH]}


@pytest.mark.parametrize(("chunk", "left"), [(16, None), (20, 5), (35, None), (LENGTH, 5)])
def test_a_chunk_takes_one_call(chunk: int, left: int | None, calls: list[Call], monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, also with the end of one document and the beginning of another; no kernel is given a mask."""
    seen = seen_by(STARTS, LENGTH, left)
    q, k, v = drawn(1, LENGTH, LENGTH, 2, 2)
    monkeypatch.setattr(cuda_attention, "_efficient_backward", None)
    monkeypatch.setattr(chunk_attention, "_merge", None)
    backwards = noted(monkeypatch, stand_in, "flash_backward", lambda g, *_: len(g))
    for start in range(0, LENGTH, chunk):
        rows, stop = slice(start, start + chunk), start + chunk
        check((q[:, :, rows], k[:, :, :stop], v[:, :, :stop]), bias_of(seen[rows, :stop]))
    assert [rows for rows, _ in calls] == backwards == CALLS[chunk]  # the rows of other chunks are of one document


@pytest.mark.parametrize("limit", ["documents", "keys"])
def test_calls_are_split_to_limit_memory(limit: str, calls: list[Call], monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward makes some rows more for each document, and the gradients of keys for all heads that share them."""
    counts = noted(monkeypatch, stand_in, "flash_backward", lambda *items: (len(items[6]) - 1, items[7][-1]))
    seen = seen_by([*range(0, 40, 4), 40], 60)
    seen = torch.cat((torch.zeros(60, 30, dtype=torch.bool), seen), 1)
    seen[:4, :30] = True  # the first document has many keys
    if limit == "documents":
        monkeypatch.setattr(flash_varlen, "MIN_DOCUMENT_LIMIT", 3)
    else:
        monkeypatch.setattr(cuda_attention, "MAX_EXPANDED_BYTES", 60 * 2 * 4 * HEAD * 8)
    check_mask(bias_of(seen))
    assert len(calls) == 1 and len(counts) > 1
    assert all(documents <= 3 for documents, _ in counts) if limit == "documents" else all(keys <= 60 for _, keys in counts)


def turned_sums(real: Any, *given: Any) -> Any:
    out, lse, *rest = real(*given)
    return out, lse.flatten().view(lse.shape[::-1]).T, *rest


def other_documents(real: Any, q: Tensor, k: Tensor, v: Tensor, rows: list[int], keys: list[int], *others: Any) -> Any:
    return real(q, k, v, [0, rows[-1]], [0, keys[-1]], *others)


def another_window(real: Any, *given: Any) -> Any:
    *first, left, right = given
    return real(*first, left + (left >= 0), right)


FAULTS = [(refuses, None), (turned_sums, None), (other_documents, None), (another_window, None), (None, another_gradient)]


@pytest.mark.parametrize(("fault", "back"), FAULTS, ids=lambda fault: getattr(fault, "__name__", "-"))
def test_incorrect_kernels_are_not_called(fault: Any, back: Any, calls: list[Call]) -> None:
    """Documents are then split: a device's kernels are tested once, on a few rows."""
    with wrong(flash_varlen.separates_documents, stand_in, ("flash", "flash_backward"), fault, back):
        check_mask(bias_of(seen_by(STARTS, LENGTH)))
        assert not flash_varlen.separates_documents(CPU, torch.float64, HEAD)


@pytest.mark.parametrize("scale", [0.0, -0.4])
def test_a_scale_that_is_not_positive_splits_documents(scale: float, calls: list[Call]) -> None:
    """Flash attention seeks the greatest score before it scales."""
    heads, mask = drawn(1, LENGTH, LENGTH), bias_of(seen_by(STARTS, LENGTH))
    truth = plain_attention.forward(*heads, mask, False, scale)
    torch.testing.assert_close(chunk_attention.forward(*heads, as_mask(mask), None, None, scale=scale), truth)
    assert not calls


# -- which masks are documents

GAP = seen_by(STARTS, LENGTH)
GAP[22:30, 22] = False  # no row sees this key, and row 22 sees no key
RECOGNIZED: list[tuple[Tensor, list[tuple[TileKind, int]]]] = [  # and the number of documents
    (seen_by(STARTS, LENGTH), [(TileKind.PACKED, 6)]),
    (seen_by(STARTS, LENGTH, causal=False), [(TileKind.PACKED, 6)]),
    (seen_by(STARTS, LENGTH)[30:62], [(TileKind.PACKED, 2)]),
    (seen_by([0], LENGTH), [(TileKind.CAUSAL, 0)]),
    (seen_by([0], LENGTH, left=3), [(TileKind.PACKED, 1)]),
    (GAP, [(TileKind.PACKED, 3), (TileKind.MIXED, 0), (TileKind.PACKED, 3)]),
]


@pytest.mark.parametrize(("seen", "kinds"), RECOGNIZED)
def test_document_masks_are_recognized(seen: Tensor, kinds: list[tuple[TileKind, int]]) -> None:
    tiles = tiles_of_mask(bias_of(seen)[:, 0], 1, packs_documents=True)
    assert [(tile.kind, len(tile.documents.rows) - 1 if tile.documents else 0) for tile in tiles] == kinds


ONE, LONG = seen_by([0], 30, left=3), seen_by([0], 20)
NOT_ONE = {"two windows": (ONE, seen_by([0], 30, left=4)), "a document of more keys than the next window shows": (LONG, ONE)}


@pytest.mark.parametrize("name", NOT_ONE)
def test_documents_with_different_windows_take_several_calls(name: str, calls: list[Call]) -> None:
    mask = bias_of(torch.block_diag(*(seen.int() for seen in NOT_ONE[name])).bool())
    assert len(tiles_of_mask(mask[:, 0], 1, packs_documents=True)) > 1
    check_mask(mask)


def test_the_backward_of_one_document_uses_the_window_kernel(calls: list[Call], monkeypatch: pytest.MonkeyPatch) -> None:
    """Many keys of one document are taken in blocks there, which a call of documents does not do."""
    keys = noted(monkeypatch, flash_window, "backward", lambda *items: items[2].shape[2])
    check_mask(bias_of(seen_by([0], 40, left=6)))
    assert keys == [40] and not calls
