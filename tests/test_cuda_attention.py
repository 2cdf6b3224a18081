"""Packed documents and cuDNN on CUDA, without a CUDA device: one call of flash attention for all documents of a chunk.

A stand-in with the kernel's contract runs in its place (`tests/support/cuda_documents.py`).
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from streamfx.frontend.backend import Compilation
from streamfx.kernels import chunk_attention, cuda_attention, cuda_cudnn, flash_varlen, flash_window, plain_attention, sdpa
from streamfx.kernels.attention_call import BOTTOM_RIGHT, AttentionCall, BottomRightCausal  # noqa: F401  (in tests/tables)
from streamfx.kernels.mask_tiles import TileKind, tiles_of_mask
from streamfx.torch_private import NoMaskForCudnn
from tests.support import cuda_documents as stand_in
from tests.support import cuda_kernels
from tests.support.calls import noted
from tests.support.cuda_kernels import Heads, another_gradient, drawn, in_their_place, refuses, wrong
from tests.support.cuda_kernels import check as compared
from tests.support.cuda_reading import plain
from tests.support.tables import listed_cases, named_cases
from tests.support.tracing import compare_function
from tests.test_cuda_kernels import as_cudnn, attended
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
    truth = plain_attention.forward(AttentionCall(*heads, mask, False, scale))
    torch.testing.assert_close(chunk_attention.forward(*heads, as_mask(mask), None, None, scale=scale), truth)
    assert not calls


# -- which masks are documents

GAP = seen_by(STARTS, LENGTH)
GAP[22:30, 22] = False  # no row sees this key, and row 22 sees no key
RECOGNIZED: list[tuple[Tensor, list[tuple[TileKind, int]]]] = listed_cases("recognized", globals())


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
    keys = noted(monkeypatch, flash_window, "backward", lambda call, *_: call.key.shape[2])
    check_mask(bias_of(seen_by([0], 40, left=6)))
    assert keys == [40] and not calls


# -- cuDNN: which calls it gets, in which layouts, and when another kernel takes its place

WIDTH, KEYS = 8, 24


def shape_of_call(call: AttentionCall, *_: Any) -> tuple[int, int, bool]:
    """Rows, keys, and whether there is a causal mask."""
    return call.query.shape[2], call.key.shape[2], bool(call.causal)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """A device that prefers cuDNN, and the calls that its kernels get, forth and back."""
    with in_their_place(half=True, cudnn=True):
        cuda_cudnn.matches_reference.cache_clear()
        cuda_cudnn.matches_reference(CPU, torch.float64, WIDTH, WIDTH)
        cuda_kernels.PLANS.clear()
        yield [noted(monkeypatch, cuda_cudnn, name, shape_of_call) for name in ("forward", "backward")]
    cuda_cudnn.matches_reference.cache_clear()


def check_chunk(q: Tensor, k: Tensor, v: Tensor, first: int) -> None:
    compared(chunk_attention, (q, k, v), (None, first, (None, 0)), (None, BOTTOM_RIGHT, None))


@pytest.mark.parametrize("batch", [1, 2])
def test_a_chunk_is_split_into_past_and_diagonal(batch: int, hopper: list[Any]) -> None:
    q, k, v = drawn(batch, KEYS, KEYS)
    for start, stop in ((0, 8), (8, 16), (16, 24)):
        check_chunk(q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop], start)
    parts = [(8, 8, False), (8, 8, True), (8, 8, True), (8, 8, True), (8, 16, False)]
    assert [sorted(calls) for calls in hopper] == [parts, parts]


BIAS = torch.zeros(1, 1, 8, KEYS, dtype=torch.float64).masked_fill(torch.arange(KEYS) % 3 == 1, float("-inf"))
LEFT: dict[str, tuple[int, int, int, Any, float | None, Any]] = named_cases("left", globals())


@pytest.mark.parametrize("name", LEFT)
def test_unsupported_calls_use_other_kernels(name: str, hopper: list[Any]) -> None:
    rows, keys, width, how, scale, truth = LEFT[name]
    heads = drawn(1, rows, keys, width=width)
    found = chunk_attention.forward(*heads, *how, scale=scale)
    bias, causal = truth
    torch.testing.assert_close(found, plain_attention.forward(AttentionCall(*heads, bias, causal, scale)))
    assert hopper == [[], []]


CHOSEN: dict[str, tuple[Any, str, Any]] = {
    "switched off": (torch.backends.cuda, "cudnn_sdp_enabled", False),
    "deterministic": (torch, "are_deterministic_algorithms_enabled", True),
    "FlashAttention-3 is active": (torch.nn.attention, "current_flash_attention_impl", "FA3"),
}


@pytest.mark.parametrize("how", CHOSEN)
def test_the_user_s_choice_of_kernels_is_respected(how: str, hopper: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, answer = CHOSEN[how]
    monkeypatch.setattr(owner, name, lambda: answer)
    check_chunk(*drawn(1, 8, KEYS), 16)
    assert hopper == [[], []]


def of_longer(item: Tensor) -> Tensor:
    longer = item.new_zeros(*item.shape[:2], 3 * item.shape[2], *item.shape[3:])
    longer[:, :, 8:16] = item
    return longer[:, :, 8:16]


LAYOUTS: list[Callable[[Tensor], Tensor]] = [
    lambda item: item,
    of_longer,
    lambda item: item.transpose(1, 2).contiguous().transpose(1, 2) if item.dim() == 4 else item,
    lambda item: item.transpose(0, 1).contiguous().transpose(0, 1),
]


def test_a_plan_for_another_layout_is_never_reused(hopper: list[Any]) -> None:
    """Results and gradients have many layouts; a user's call of one sequence may have cached a plan for another."""
    q, k, v = drawn(1, 8, 8)
    call = AttentionCall(q, k, v, causal=True)
    out, lse = plain_attention.forward(call)
    gradient = torch.randn_like(out).contiguous()
    wanted = plain_attention.backward(call, gradient, out, lse)
    for layout in LAYOUTS:
        torch.testing.assert_close(cuda_attention.backward(call, layout(gradient), layout(out), layout(lse)), wanted)
    assert len(hopper[1]) == len(LAYOUTS) and len(cuda_kernels.PLANS) == 1
    expanded = torch.ones(1, 1, 1, 1, dtype=torch.float64).expand_as(gradient)
    made = cuda_attention.backward(call, expanded, out, lse)
    torch.testing.assert_close(made, plain_attention.backward(call, expanded, out, lse))
    cuda_kernels.PLANS.clear()
    seed = torch.zeros((), dtype=torch.int64)
    as_eager = gradient, q, k, v, plain(q, k, v, None, True, None)[0], lse.unsqueeze(-1), seed, seed
    cuda_kernels.cudnn_backward(*as_eager, None, None, None, 8, 8, 0.0, True)
    torch.testing.assert_close(cuda_attention.backward(call, gradient, out, lse), wanted)


@pytest.mark.parametrize(("groups", "length"), [(4, 32), (1, 19)])
def test_programs_stream_with_cudnn(groups: int, length: int, hopper: list[Any]) -> None:
    x = torch.randn(2, length, (4 + 2 * groups) * WIDTH, dtype=torch.float64, requires_grad=True)
    compare_function(
        lambda x: attended(as_cudnn, x, groups, None, True), [x], (8, 12, length), streams=True, attention={"causal"}
    )
    assert {is_causal for *_, is_causal in hopper[0]} == {True, False}


def at_the_last(real: Any, call: AttentionCall) -> Any:
    return real(call) if call.causal else plain(*call[:3], None, True, call.scale, last=True)


def no_gradient(real: Any, *given: Any) -> Any:
    return another_gradient(real, *given, by=torch.nan)


@pytest.mark.parametrize(("fault", "back"), [(refuses, None), (at_the_last, None), (None, another_gradient), (None, no_gradient)])
def test_incorrect_kernels_of_cudnn_are_not_called(fault: Any, back: Any) -> None:
    with (
        in_their_place(half=True, cudnn=True),
        wrong(cuda_cudnn.matches_reference, cuda_cudnn, ("forward", "backward"), fault, back),
    ):
        assert not cuda_cudnn.matches_reference(CPU, torch.float64, WIDTH, WIDTH)
        assert not cuda_cudnn.supports(AttentionCall(*drawn(1, 8, 8), causal=True))
        assert sdpa.supports_bottom_right(AttentionCall(*drawn(1, 8, KEYS)), BOTTOM_RIGHT)


def test_flash_attention_3_replaces_both_kernels(hopper: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Activated by PyTorch's own call, it answers flash attention's operators (torch/nn/attention/_fa3.py); it is asked for a
    chunk in one call, whose mask ends at the last row, and tried anew for windows.
    """

    class Handle:
        def remove(self) -> None: ...

    calls = noted(monkeypatch, cuda_attention, "_flash_tile", lambda call, *_: (call.query.shape[2], call.key.shape[2]))
    of_torch, tried = torch.nn.attention, len(flash_window.masks_correctly._outcomes)
    of_torch.register_flash_attention_impl("stand-in", register_fn=Handle)
    of_torch.activate_flash_attention_impl("stand-in")
    try:
        heads = drawn(1, 8, KEYS)
        check_chunk(*heads, 16)
        assert hopper == [[], []] and calls == [(8, KEYS)]
        chunk_attention.forward(*heads, None, 16, (-5, 0))
        assert len(flash_window.masks_correctly._outcomes) == tried + 1
    finally:
        of_torch.restore_flash_attention_impl()
    check_chunk(*heads, 16)
    assert all(hopper) and calls == [(8, KEYS)]


# -- the operator that eager chooses while a mask is traced


@pytest.mark.compiled
@pytest.mark.parametrize(("masked", "by_name"), [(False, True), (True, True), (True, False)])
def test_cudnn_is_disabled_while_a_mask_is_traced(masked: bool, by_name: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's operator gets -65504 at hidden positions of a boolean mask (2.11); planning sees the user's setting."""
    flags = torch.backends.cuda
    planned = noted(monkeypatch, Compilation, "partition", lambda *_: flags.cudnn_sdp_enabled())
    traced = noted(monkeypatch, flags, "enable_cudnn_sdp", lambda on: on)

    def model(q: Tensor, mask: Tensor) -> Tensor:
        if masked and not by_name:
            return F.scaled_dot_product_attention(q, q, q, mask).sum()
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask if masked else None, is_causal=not masked).sum()

    for device in ("cpu", "meta"):  # a mode costs time, so a trace for CPUs has none
        q = torch.randn(1, 2, 64, 8, device=device, requires_grad=True)
        torch.compile(model, backend="streambp")(q, torch.ones(64, 64, dtype=torch.bool, device=device).tril()).backward()
        assert planned == [True] and flags.cudnn_sdp_enabled()
        assert (traced[:2] == [False, True]) if masked and device == "meta" else not traced
        planned.clear()


def test_cudnn_stays_enabled_if_it_is_the_only_fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    q, mask = torch.randn(1, 2, 4, 8), torch.ones(4, 4, dtype=torch.bool).tril()
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]), NoMaskForCudnn():
        monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", lambda on: pytest.fail("the user's choice is changed"))
        F.scaled_dot_product_attention(q, q, q, mask)
        monkeypatch.undo()
    assert torch.backends.cuda.cudnn_sdp_enabled()
