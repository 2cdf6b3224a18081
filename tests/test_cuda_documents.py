"""Packed documents on CUDA, without a CUDA device: one call of flash attention for all that a chunk has of them.

A stand-in with the kernel's contract runs in its place (`tests/support/cuda_documents.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from streamfx.runtime import attention, cuda_attention, cuda_documents, cuda_windows, kernels, plain_attention
from streamfx.runtime.mask_programs import Mask
from streamfx.runtime.plain_attention import Documents
from streamfx.runtime.visible import Kind, pieces_of
from tests.support import cuda_documents as stand_in
from tests.support.cuda_kernels import in_their_place
from tests.support.exactness import compare
from tests.support.flash_package import IS_STAND_IN
from tests.support.tracing import compare_function
from tests.test_flash_package import CASES, PLAIN_ENDS, Decoder, packed
from tests.test_visible import as_mask, masks

HEAD = 8
INF = float("inf")
Call = tuple[int, int]  # rows, and documents


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Call]]:
    """Forward calls of the kernel; float64 stands for a half type."""
    made: list[Call] = []
    flash = stand_in.flash

    def noted(q: Tensor, k: Tensor, v: Tensor, rows: list[int], *others: Any) -> Any:
        made.append((len(q), len(rows) - 1))
        return flash(q, k, v, rows, *others)

    with in_their_place(half=True):
        cuda_documents.keeps_apart(torch.device("cpu"), torch.float64, HEAD)
        monkeypatch.setattr(stand_in, "flash", noted)
        yield made


def seen_by(starts: list[int], length: int, left: int | None = None, causal: bool = True) -> Tensor:
    """Rows of one sequence and the keys that they see: of their own document, none behind them, and so many before."""
    at = torch.arange(length)
    document = (at[:, None] >= torch.tensor(starts)).sum(1)
    seen = document == document[:, None]
    seen &= (at <= at[:, None]) | (not causal)
    return seen if left is None else seen & (at >= at[:, None] - left)


def bias_of(*seen: Tensor) -> Tensor:
    stacked = torch.stack(seen)[:, None]
    return torch.zeros(stacked.shape, dtype=torch.float64).masked_fill(~stacked, -INF)


STARTS = [0, 20, 21, 22, 30, 61]
LENGTH = 67
BATCHES: dict[str, list[Tensor]] = {
    "documents": [seen_by(STARTS, LENGTH)],
    "documents with a window": [seen_by(STARTS, LENGTH, left=5)],
    "both ways": [seen_by(STARTS, LENGTH, causal=False)],
    "other documents in each sequence": [seen_by(STARTS, LENGTH), seen_by([0, 3], LENGTH), seen_by(STARTS, LENGTH)],
    "a document of each row": [torch.eye(LENGTH, dtype=torch.bool)],
    "padding that sees itself": [seen_by(STARTS, LENGTH) & (torch.arange(LENGTH) >= 18) | torch.eye(LENGTH, dtype=torch.bool)],
    "padding behind documents": [seen_by(STARTS, LENGTH) | (torch.arange(LENGTH) >= 61)[:, None]],
}


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("name", BATCHES)
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


@pytest.mark.parametrize("left", [None, 5])
@pytest.mark.parametrize("chunk", CALLS)
def test_a_chunk_takes_one_call(chunk: int, left: int | None, calls: list[Call], monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, also with the end of one document and the beginning of another; no kernel is given a mask."""
    seen = seen_by(STARTS, LENGTH, left)
    q, k, v, gradient = torch.randn(4, 1, 2, LENGTH, HEAD, dtype=torch.float64).unbind()
    truth = plain_attention.forward(q, k, v, bias_of(seen), False, None)
    gradients = plain_attention.backward(gradient, q, k, v, *truth, bias_of(seen), False, None)
    monkeypatch.setattr(cuda_attention, "_efficient_backward", None)
    monkeypatch.setattr(attention, "_merge", None)
    backwards: list[int] = []
    flash_backward = stand_in.flash_backward

    def noted(g: Tensor, *others: Any) -> Any:
        backwards.append(len(g))
        return flash_backward(g, *others)

    monkeypatch.setattr(stand_in, "flash_backward", noted)
    made = [torch.zeros_like(k), torch.zeros_like(v)]
    for start in range(0, LENGTH, chunk):
        rows = slice(start, start + chunk)
        mask = as_mask(bias_of(seen[rows, : start + chunk]))
        heads = q[:, :, rows], k[:, :, : start + chunk], v[:, :, : start + chunk]
        out, lse = attention.forward(*heads, mask, None, None)
        torch.testing.assert_close((out, lse), (truth[0][:, :, rows], truth[1][:, :, rows]))
        dq, dk, dv = attention.backward(gradient[:, :, rows], *heads, out, lse, mask, None, None)
        torch.testing.assert_close(dq, gradients[0][:, :, rows])
        for total, part in zip(made, (dk, dv), strict=True):
            total[:, :, : start + chunk] += part
    torch.testing.assert_close(made, list(gradients[1:]))
    assert [rows for rows, _ in calls] == backwards == CALLS[chunk]  # the rows of other chunks are of one document


def drawn(mask: Tensor, groups: int = 2) -> tuple[list[Tensor], Mask]:
    torch.manual_seed(0)
    batch, _, rows, keys = mask.shape
    sizes = (4, rows), (groups, keys), (groups, keys), (4, rows)
    return [torch.randn(batch, heads, size, HEAD, dtype=torch.float64) for heads, size in sizes], as_mask(mask)


def check(mask: Tensor, groups: int = 2) -> None:
    """Attention by the mask's pieces is attention."""
    (q, k, v, gradient), pieces = drawn(mask, groups)
    truth = plain_attention.forward(q, k, v, mask, False, None)
    found = attention.forward(q, k, v, pieces, None, None)
    torch.testing.assert_close(found, truth)
    made = attention.backward(gradient, q, k, v, *found, pieces, None, None)
    torch.testing.assert_close(made, plain_attention.backward(gradient, q, k, v, *truth, mask, False, None))


@pytest.mark.parametrize("limit", ["documents", "keys"])
def test_what_would_take_much_memory_takes_several_calls(limit: str, calls: list[Call], monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward makes some rows more for each document, and the gradients of keys for all heads that share them."""
    counts: list[tuple[int, int]] = []
    flash_backward = stand_in.flash_backward

    def noted(*items: Any) -> Any:
        counts.append((len(items[6]) - 1, items[7][-1]))
        return flash_backward(*items)

    monkeypatch.setattr(stand_in, "flash_backward", noted)
    seen = seen_by([*range(0, 40, 4), 40], 60)
    seen = torch.cat((torch.zeros(60, 30, dtype=torch.bool), seen), 1)
    seen[:4, :30] = True  # the first document has many keys
    if limit == "documents":
        monkeypatch.setattr(cuda_documents, "FEW", 3)
    else:
        monkeypatch.setattr(cuda_attention, "EXPANDED", 60 * 2 * 4 * HEAD * 8)
    check(bias_of(seen))
    assert len(calls) == 1 and len(counts) > 1
    assert all(documents <= 3 for documents, _ in counts) if limit == "documents" else all(keys <= 60 for _, keys in counts)


@pytest.mark.parametrize(
    "fault", ["refuses", "another gradient", "log-sum-exps of another layout", "shows other documents", "hides a key less"]
)
def test_kernels_that_differ_are_not_called(fault: str, calls: list[Call], monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents are then taken apart: what a device's kernels do is tried on a few rows, once."""
    flash, flash_backward = stand_in.flash, stand_in.flash_backward

    def forward(q: Tensor, k: Tensor, v: Tensor, rows: list[int], keys: list[int], *others: Any) -> Any:
        if fault == "refuses":
            raise RuntimeError("This flash attention build does not support it.")
        if fault == "shows other documents":
            return flash(q, k, v, [0, rows[-1]], [0, keys[-1]], *others)
        scale, left, right = others
        out, lse, *rest = flash(q, k, v, rows, keys, scale, left + (fault == "hides a key less" and left >= 0), right)
        return out, lse.flatten().view(lse.shape[::-1]).T if fault.startswith("log") else lse, *rest

    def backward(*items: Any) -> Any:
        dq, dk, dv = flash_backward(*items)
        return dq, dk, dv * (1.1 if fault == "another gradient" else 1)

    monkeypatch.setattr(stand_in, "flash", forward)
    monkeypatch.setattr(stand_in, "flash_backward", backward)
    cuda_documents.keeps_apart.cache_clear()
    try:
        check(bias_of(seen_by(STARTS, LENGTH)))
        assert not cuda_documents.keeps_apart(torch.device("cpu"), torch.float64, HEAD)
    finally:
        cuda_documents.keeps_apart.cache_clear()


@pytest.mark.parametrize("scale", [0.0, -0.4])
def test_a_scale_that_turns_scores_around_takes_them_apart(scale: float, calls: list[Call]) -> None:
    """Flash attention seeks the greatest score before it scales."""
    (q, k, v, _), mask = drawn(bias_of(seen_by(STARTS, LENGTH)))
    truth = plain_attention.forward(q, k, v, mask.dense(), False, scale)
    torch.testing.assert_close(attention.forward(q, k, v, mask, None, None, scale=scale), truth)
    assert not calls


@pytest.mark.parametrize("causal", [True, False])
def test_documents_without_a_kernel(causal: bool) -> None:
    """What plain operators make of them is what their mask says."""
    documents = Documents((0, 3, 4, 9), (0, 5, 6, 11), causal, 2 if causal else None)
    (q, k, v, gradient), _ = drawn(torch.zeros(1, 1, 9, 11, dtype=torch.float64))
    seen = torch.zeros(9, 11, dtype=torch.bool)
    for (start, stop), (first, end) in (((0, 3), (0, 5)), ((3, 4), (5, 6)), ((4, 9), (6, 11))):
        rows, keys = torch.arange(stop - start)[:, None] - (stop - start), torch.arange(end - first) - (end - first)
        seen[start:stop, first:end] = (keys <= rows) & (keys >= rows - 2) if causal else torch.tensor(True)
    mask = bias_of(seen)
    found = kernels.PLAIN.forward(q, k, v, None, documents, None)
    torch.testing.assert_close(found, kernels.PLAIN.forward(q, k, v, mask, False, None))
    made = kernels.PLAIN.backward(gradient, q, k, v, *found, None, documents, None)
    torch.testing.assert_close(made, kernels.PLAIN.backward(gradient, q, k, v, *found, mask, False, None))


@given(masks(), st.sampled_from([1, 2, 4]), st.integers(0, 1000))
def test_attention_by_pieces_is_attention(mask: Tensor, groups: int, seed: int) -> None:
    """Of anything that rows may see, where each sees something."""
    mask = torch.where((mask < -1e30).all(-1, keepdim=True), 0.0, mask)[:, None]
    with in_their_place(half=True):
        check(mask, groups)


@pytest.mark.skipif(not IS_STAND_IN, reason="the package itself is installed, and needs a GPU")
@pytest.mark.parametrize("name", ["causal", "window", "all keys"])
def test_a_packed_decoder_streams(name: str, calls: list[Call]) -> None:
    """From the flash-attn package's call to that of the device's kernel, forth and back."""
    how, groups, seen = CASES[name]
    model, ends = Decoder(how, groups).double(), packed(PLAIN_ENDS)
    compare(model, ends, chunk_size=16, loss_chunk_size=5, also=(1, 7), attention=seen, streams=True)
    assert any(documents > 1 for _, documents in calls)


# -- which masks are documents


def kinds(seen: Tensor) -> list[tuple[Kind, int | None]]:
    pieces = pieces_of(bias_of(seen)[:, 0], 1, packs=True)
    return [(piece.kind, None if piece.documents is None else len(piece.documents.rows) - 1) for piece in pieces]


def test_what_is_documents() -> None:
    assert kinds(seen_by(STARTS, LENGTH)) == [(Kind.PACKED, 6)]
    assert kinds(seen_by(STARTS, LENGTH, causal=False)) == [(Kind.PACKED, 6)]
    assert kinds(seen_by(STARTS, LENGTH)[30:62]) == [(Kind.PACKED, 2)]
    assert kinds(seen_by([0], LENGTH)) == [(Kind.CAUSAL, None)], "one document has a kernel of its own"
    assert kinds(seen_by([0], LENGTH, left=3)) == [(Kind.PACKED, 1)]
    gap = seen_by(STARTS, LENGTH)
    gap[22:30, 22] = False  # a key that no row sees, and a row that sees nothing
    assert kinds(gap) == [(Kind.PACKED, 3), (Kind.MIXED, None), (Kind.PACKED, 3)]


def two_windows() -> Tensor:
    return torch.block_diag(seen_by([0], 30, left=3).int(), seen_by([0], 30, left=4).int()).bool()


def longer_than_the_window() -> Tensor:
    """A document of which each row sees more than those of the next, whose first keys a window hides."""
    return torch.block_diag(seen_by([0], 20).int(), seen_by([0], 30, left=3).int()).bool()


@pytest.mark.parametrize("made", [two_windows, longer_than_the_window])
def test_what_is_not_one_call(made: Callable[[], Tensor], calls: list[Call]) -> None:
    pieces = pieces_of(bias_of(made())[:, 0], 1, packs=True)
    assert len(pieces) > 1
    check(bias_of(made()))


# -- the stand-in: what breaks the contract is seen


def broken_ends(form: str) -> tuple[Any, ...]:
    rows, keys = (torch.tensor(own, dtype=torch.int32) for own in ((0, 3, 9), (0, 5, 11)))
    ends: dict[str, tuple[Any, ...]] = {
        "int64": (rows.long(), keys, 6, 6),
        "strided": (torch.stack((rows, rows), 1)[:, 0], keys, 6, 6),
        "short": (rows, keys, 6, 5),
        "rows left over": (rows - (rows == 9).int(), keys, 6, 6),
        "one end less": (rows[:2], keys, 6, 6),
    }
    return ends[form]


@pytest.mark.parametrize("form", ["int64", "strided", "short", "rows left over", "one end less"])
def test_the_stand_in_sees_ends_that_the_kernel_misreads(form: str, calls: list[Call]) -> None:
    q, k, v = (torch.randn(rows, heads, HEAD, dtype=torch.float64) for rows, heads in ((9, 4), (11, 2), (11, 2)))
    with pytest.raises(AssertionError):
        torch.ops.aten._flash_attention_forward(q, k, v, *broken_ends(form), 0.0, False, False, window_size_right=0)


def test_a_window_of_one_document_goes_back_as_a_window(calls: list[Call], monkeypatch: pytest.MonkeyPatch) -> None:
    """Many keys of one document are taken in blocks there, which a call of documents does not do."""
    noted: list[int] = []
    backward = cuda_windows.backward

    def spy(*items: Any) -> Any:
        noted.append(items[2].shape[2])
        return backward(*items)

    monkeypatch.setattr(cuda_windows, "backward", spy)
    check(bias_of(seen_by([0], 40, left=6)))
    assert noted == [40] and not calls
