"""Fused attention of CUDA, without a CUDA device: stand-ins with the kernels' contracts run in the kernels' places.

What is tested is all but the kernels' arithmetic: recognising their operators, and calling them on chunks in the way that they
can be called (`tests/support/cuda_kernels.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from streamfx.kernels import attention, cuda_attention, efficient_bottom_right, flash_window, plain_attention, sdpa
from streamfx.kernels.plain_attention import LAST
from tests.support.cuda_kernels import in_their_place
from tests.support.cuda_reading import plain
from tests.support.spread import spread
from tests.support.tracing import compare_function, traced

aten = torch.ops.aten
HEAD = 8


@pytest.fixture
def half() -> Iterator[None]:
    with in_their_place(half=True):
        yield


def as_flash(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> Tensor:
    assert bias is None
    out: Tensor = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False)[0]
    return out


def as_efficient(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> Tensor:
    """With its bias prepared as `scaled_dot_product_attention` does."""
    k, v = (item.repeat_interleave(q.shape[1] // item.shape[1], 1) for item in (k, v))
    if bias is not None:
        keys = k.shape[2]
        bias = F.pad(bias, (0, -keys % 16))[..., :keys].expand(*q.shape[:3], keys)  # attention.cpp: pad_bias
    out: Tensor = aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, causal)[0]
    return out


def as_cudnn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> Tensor:
    out: Tensor = aten._scaled_dot_product_cudnn_attention(q, k, v, bias, True, 0.0, causal, False)[0]
    return out


OPERATORS = {"flash": as_flash, "efficient": as_efficient, "cudnn": as_cudnn}


def self_attention(kernel: str, mask: Callable[[int], Tensor] | None, causal: bool, groups: int) -> Callable[..., Tensor]:
    """One tensor [B, T, (heads + 2 groups) D] to a number; eager computes what it should by the math of attention."""

    def function(x: Tensor) -> Tensor:
        length = x.shape[1]
        q, k, v = x.unflatten(-1, (-1, HEAD)).transpose(1, 2).split((4, groups, groups), 1)
        bias = None if mask is None else torch.zeros(length, length, dtype=x.dtype).masked_fill(~mask(length), float("-inf"))
        if torch.compiler.is_compiling() or _is_traced(x):
            out = OPERATORS[kernel](q, k, v, bias, causal)
        else:
            out = plain(q, k, v, bias, causal, None)[0]
        return (out * torch.linspace(0.5, 1.5, HEAD, dtype=x.dtype)).pow(2).sum()

    return function


def _is_traced(x: Tensor) -> bool:
    return isinstance(x, torch._subclasses.FakeTensor | torch._subclasses.functional_tensor.FunctionalTensor)


def triangle(length: int) -> Tensor:
    return torch.arange(length)[None] <= torch.arange(length)[:, None]


def window(length: int) -> Tensor:
    return triangle(length) & (torch.arange(length)[None] > torch.arange(length)[:, None] - 5)


STREAMS = [
    ("flash", None, True, "causal", True),
    ("flash", None, False, "masked", True),
    ("cudnn", None, True, "causal", True),
    *(
        ("efficient", mask, causal, verdict, half)
        for mask, causal, verdict in (
            (None, True, "causal"),
            (triangle, False, "causal"),
            (window, False, "window(5)"),
            (None, False, "masked"),
        )
        for half in (True, False)
    ),
]


CASES = [(*stream, groups, length) for stream in STREAMS for groups in (4, 2, 1) for length in (19, 32)]


@pytest.mark.parametrize(("kernel", "mask", "causal", "verdict", "half", "groups", "length"), spread(CASES, 5))
def test_kernels_stream(kernel: str, mask: Any, causal: bool, verdict: str, half: bool, groups: int, length: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, length, (4 + 2 * groups) * HEAD, dtype=torch.float64, requires_grad=True)
    function = self_attention(kernel, mask, causal, groups)
    with in_their_place(half):
        compare_function(function, [x], (5, 1, length), streams=True, attention={verdict})


@pytest.mark.parametrize("half", [True, False])
def test_masks_of_data_stream(half: bool) -> None:
    """Padding on the left, packed documents, and rows that see this and that: pieces of all kinds."""

    def function(x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = x.unflatten(-1, (-1, HEAD)).transpose(1, 2).chunk(3, 1)
        out = as_efficient(q, k, v, mask, False) if _is_traced(x) else plain(q, k, v, mask, False, None)[0]
        return (out * torch.linspace(0.5, 1.5, HEAD, dtype=x.dtype)).pow(2).sum()

    torch.manual_seed(0)
    length = 67
    document = torch.arange(length) // 23
    padded = triangle(length) & (torch.arange(length) >= 9) | torch.eye(length, dtype=torch.bool)
    seen = torch.stack(
        [padded, triangle(length) & (document == document[:, None]), triangle(length) & (torch.rand(length) < 0.7)]
    )
    seen[2] |= torch.eye(length, dtype=torch.bool)
    mask = torch.zeros(3, 1, length, length, dtype=torch.float64).masked_fill(~seen[:, None], float("-inf"))
    x = torch.randn(3, length, 6 * HEAD, dtype=torch.float64, requires_grad=True)
    with in_their_place(half):
        compare_function(function, [x, mask], (20, length), streams=True)


@pytest.mark.parametrize("half", [True, False], ids=["flash", "efficient"])
@pytest.mark.parametrize("width", [HEAD, 5])
def test_a_chunk_takes_one_call(width: int, half: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a kernel whose causal mask ends at the last row and key; nothing is merged or joined."""
    calls: list[tuple[int, int]] = []

    def noted(query: Tensor, key: Tensor, *others: Any) -> Any:
        calls.append((query.shape[2], key.shape[2]))
        return flash_window.forward(query, key, *others)

    monkeypatch.setattr(attention, "_merge", None)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 21, width, dtype=torch.float64) for heads in (4, 2, 2))
    wanted, lse = plain(q, k, v, None, True, None)
    with in_their_place(half):
        sdpa.KERNELS["cpu"] = sdpa.KERNELS["cpu"]._replace(forward=noted)
        for start, stop in ((0, 8), (8, 16), (16, 21), (20, 21)):
            seen = q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop]
            found = attention.forward(*seen, None, start, (None, 0))
            torch.testing.assert_close(found, (wanted[:, :, start:stop], lse[:, :, start:stop]))
            gradient = torch.randn_like(found[0])
            truth = plain_attention.backward(gradient, *seen, *found, None, LAST, None)
            torch.testing.assert_close(attention.backward(gradient, *seen, *found, None, start, (None, 0)), truth)
    assert calls == [(8, 8), (8, 16), (5, 21), (1, 21)]


@pytest.mark.parametrize("causal", [LAST, False])
@pytest.mark.parametrize(("rows", "keys", "blocks"), [(8, 40, 6), (1, 9, 2), (8, 13, 1), (20, 21, 1)])
def test_many_keys_take_several_calls(rows: int, keys: int, blocks: int, causal: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where heads share keys, the kernel makes the gradients of all heads before it adds them up."""
    calls: list[int] = []
    block = cuda_attention._flash_block

    def noted(*given: Any) -> Any:
        calls.append(given[2].shape[2])
        return block(*given)

    monkeypatch.setattr(cuda_attention, "_flash_block", noted)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, size, HEAD, dtype=torch.float64) for heads, size in ((4, rows), (2, keys), (2, keys)))
    monkeypatch.setattr(cuda_attention, "EXPANDED", 6 * 2 * q[:, :, 0].nbytes)
    with in_their_place(half=True):
        found = cuda_attention.forward(q, k, v, None, causal, None)
        gradient = torch.randn_like(found[0])
        made = cuda_attention.backward(gradient, q, k, v, *found, None, causal, None)
    torch.testing.assert_close(made, plain_attention.backward(gradient, q, k, v, *found, None, causal, None))
    assert sum(calls) == keys and len(calls) >= min(blocks, 2) and max(calls) <= max(6, rows) + rows


BLOCKED = [(heads, groups, causal, rows, keys) for heads, groups in ((4, 4), (4, 2), (4, 1), (1, 1)) for causal, rows, keys in (
    (True, 26, 26), (LAST, 26, 26), (LAST, 17, 30), (LAST, 9, 40), (False, 26, 19), (False, 17, 17))]  # fmt: skip


@pytest.mark.parametrize(("heads", "groups", "causal", "rows", "keys"), BLOCKED)
def test_many_rows_take_several_calls(
    heads: int, groups: int, causal: Any, rows: int, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel sums the queries' gradient in single precision, and makes that of keys for all heads: those of a block alone."""
    calls: list[tuple[int, int, int]] = []
    block = cuda_attention._flash_block

    def noted(*given: Any) -> Any:
        calls.append((given[1].shape[1], given[1].shape[2], given[2].shape[2]))
        return block(*given)

    monkeypatch.setattr(cuda_attention, "_flash_block", noted)
    monkeypatch.setattr(cuda_attention, "ACCUMULATED", 2 * (heads // groups) * 8 * (1 + HEAD) * 4)
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(2, own, size, HEAD, dtype=torch.float64) for own, size in ((heads, rows), (groups, keys), (groups, keys))
    )
    with in_their_place(half=True):
        found = cuda_attention.forward(q, k, v, None, causal, None)
        gradient = torch.randn_like(found[0])
        made = cuda_attention.backward(gradient, q, k, v, *found, None, causal, None)
    torch.testing.assert_close(made, plain_attention.backward(gradient, q, k, v, *found, None, causal, None))
    assert len(calls) > 1 and all(own == heads // groups and size <= 8 and seen <= 16 for own, size, seen in calls)
    pairs = sum(rows * keys for own, rows, keys in calls) // groups
    assert pairs < rows * keys or not causal or keys > rows  # what no row sees is left out


def test_a_causal_mask_that_begins_at_the_first_row(half: None) -> None:
    """With more keys than rows flash attention's mask begins elsewhere: another kernel takes them."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, size, HEAD, dtype=torch.float64) for size in (5, 9, 9))
    found = cuda_attention.forward(q, k, v, None, True, None)
    torch.testing.assert_close(found, plain_attention.forward(q, k, v, None, True, None))
    gradient = torch.randn_like(found[0])
    made = cuda_attention.backward(gradient, q, k, v, *found, None, True, None)
    torch.testing.assert_close(made, plain_attention.backward(gradient, q, k, v, *found, None, True, None))


@pytest.mark.parametrize("bias", [None, torch.zeros(1, 1, 9, 9, dtype=torch.bfloat16)], ids=["flash", "efficient"])
def test_merged_results_are_rounded_to_the_type_that_kernels_read(bias: Tensor | None, half: None) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 9, HEAD, dtype=torch.bfloat16) for _ in range(3))
    out, lse = cuda_attention.forward(q, k, v, bias, False, None)
    made = cuda_attention.backward(torch.ones_like(out).float(), q, k, v, out.float(), lse, bias, False, None)
    assert [part.dtype for part in made] == [torch.bfloat16] * 3


def test_dropout_is_left_to_its_kernel(half: None) -> None:
    def function(x: Tensor) -> Tensor:
        q, k, v = x.unflatten(-1, (3, HEAD)).unbind(2)
        q, k, v = (item[:, None] for item in (q, k, v))
        out: Tensor = aten._scaled_dot_product_flash_attention(q, k, v, 0.5, True, False)[0]
        return out.sum()

    with pytest.raises(AssertionError):  # the stand-in has no dropout: the original operator is what was called
        traced(function, [torch.randn(2, 9, 3 * HEAD, dtype=torch.float64, requires_grad=True)])


def test_a_bias_that_wants_a_gradient_is_left_to_its_kernel(half: None) -> None:
    def function(x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = (item[:, None] for item in x.unflatten(-1, (3, HEAD)).unbind(2))
        out: Tensor = aten._scaled_dot_product_efficient_attention(q, k, v, bias.expand(2, 1, 16, 16), True, 0.0, False)[0]
        return out.sum()

    x = torch.randn(2, 16, 3 * HEAD, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(16, 16, dtype=torch.float64, requires_grad=True)
    with pytest.raises(AssertionError):  # the stand-in has no gradient for it
        traced(function, [x, bias])


@contextmanager
def without_biases() -> Iterator[None]:
    def refused(*_: Any, **__: Any) -> Any:
        raise AssertionError("a kernel with a bias was called")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_attention, "forward", refused)
        patch.setattr(cuda_attention, "backward", refused)
        yield


def bands(rows: int, keys: int, left: int) -> Tensor:
    """A bias that shows keys i + keys - rows - left .. i + keys - rows."""
    own = torch.arange(rows)[:, None] + keys - rows
    seen = (torch.arange(keys) <= own) & (torch.arange(keys) >= own - left)
    return torch.zeros(1, 1, rows, keys, dtype=torch.float64).masked_fill(~seen, float("-inf"))


@pytest.mark.parametrize(
    ("rows", "keys", "left"), [(8, 12, 4), (8, 8, 3), (1, 5, 4), (1, 1, 0), (5, 11, 0), (3, 9, 8), (3, 9, 9), (3, 9, 1 << 40)]
)
@pytest.mark.parametrize("width", [HEAD, 5])
@pytest.mark.parametrize("is_half", [True, False], ids=["flash", "efficient"])
def test_a_window_takes_one_call_without_a_bias(rows: int, keys: int, left: int, width: int, is_half: bool) -> None:
    with in_their_place(is_half):
        check_window(rows, keys, left, width)


def check_window(rows: int, keys: int, left: int, width: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, size, width, dtype=torch.float64) for heads, size in ((4, rows), (2, keys), (2, keys)))
    bias, span = bands(rows, keys, left), (-left, 0)
    wanted = plain_attention.forward(q, k, v, bias, False, None)
    with without_biases():
        found = attention.forward(q, k, v, None, keys - rows, span)
        gradient = torch.randn_like(found[0])
        made = attention.backward(gradient, q, k, v, *found, None, keys - rows, span)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(made, plain_attention.backward(gradient, q, k, v, *wanted, bias, False, None))


def test_values_of_another_width_take_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flash attention does not take them, and the other kernel does."""
    monkeypatch.setattr(attention, "_merge", None)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, rows, width, dtype=torch.float64) for rows, width in ((5, 16), (9, 16), (9, 8)))
    with in_their_place(half=True):
        found = attention.forward(q, k, v, None, 4, (None, 0))
        gradient = torch.randn_like(found[0])
        made = attention.backward(gradient, q, k, v, *found, None, 4, (None, 0))
    torch.testing.assert_close(found, plain_attention.forward(q, k, v, None, LAST, None))
    torch.testing.assert_close(made, plain_attention.backward(gradient, q, k, v, *found, None, LAST, None))


@pytest.mark.parametrize("window", [(None, 0), (-2, 0)])
@pytest.mark.parametrize("fault", ["refuses", "aligned at the first row", "another window", "another gradient"])
def test_kernels_that_end_elsewhere_are_not_called(
    fault: str, window: tuple[int | None, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The past and the diagonal are then two calls, and a window is a bias."""
    real, real_backward = efficient_bottom_right.forward, efficient_bottom_right.backward

    def forward(q: Tensor, k: Tensor, v: Tensor, left: int, scale: float | None) -> Any:
        if fault == "refuses":
            raise RuntimeError("custom_mask_type is not supported")
        if fault == "aligned at the first row":
            return plain(q, k, v, None, True, scale)
        return real(q, k, v, left + (fault == "another window"), scale)

    def backward(*given: Any) -> Any:
        dq, dk, dv = real_backward(*given)
        return dq, dk * (1.1 if fault == "another gradient" else 1), dv

    monkeypatch.setattr(efficient_bottom_right, "forward", forward)
    monkeypatch.setattr(efficient_bottom_right, "backward", backward)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, size, HEAD, dtype=torch.float64) for size in (5, 9, 9))
    bias = bands(5, 9, 9 if window[0] is None else -window[0])
    efficient_bottom_right.hides.cache_clear()
    try:
        with in_their_place(half=False):
            has_window = window[0] is not None
            right = fault == "another window" and not has_window
            assert efficient_bottom_right.hides(q.device, q.dtype, HEAD, has_window) == right
            found = attention.forward(q, k, v, None, 4, window)
            gradient = torch.randn_like(found[0])
            made = attention.backward(gradient, q, k, v, *found, None, 4, window)
    finally:
        efficient_bottom_right.hides.cache_clear()
    wanted = plain_attention.forward(q, k, v, bias, False, None)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(made, plain_attention.backward(gradient, q, k, v, *wanted, bias, False, None))


@pytest.mark.parametrize("window", [(-4, 1), (-4, -1), (None, 1)])
def test_a_window_that_ends_elsewhere_is_a_bias(window: tuple[int | None, int], half: None) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, size, HEAD, dtype=torch.float64) for size in (5, 9, 9))
    low, high = window
    delta = torch.arange(9) - torch.arange(4, 9)[:, None]
    hidden = (delta > high) | (delta < (-9 if low is None else low))
    bias = torch.zeros(1, 1, 5, 9, dtype=torch.float64).masked_fill(hidden, float("-inf"))
    torch.testing.assert_close(attention.forward(q, k, v, None, 4, window), plain_attention.forward(q, k, v, bias, False, None))


@pytest.mark.parametrize("fault", ["refuses", "shows too much", "another gradient"])
def test_kernels_that_do_not_hide_are_not_called(fault: str, half: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window is then a bias: what a device's kernels do is tried on a few rows, once."""
    real = flash_window._flash, flash_window._flash_backward

    def forward(q: Tensor, k: Tensor, v: Tensor, left: int, scale: float | None) -> Any:
        if fault == "refuses":
            raise RuntimeError("This flash attention build does not support local attention.")
        return real[0](q, k, v, left + (fault == "shows too much"), scale)

    def backward(*given: Any) -> Any:
        made = real[1](*given)
        return (made[0], made[1].mul(1.1), made[2]) if fault == "another gradient" else made

    monkeypatch.setattr(flash_window, "_flash", forward)
    monkeypatch.setattr(flash_window, "_flash_backward", backward)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, size, HEAD, dtype=torch.float64) for size in (5, 9, 9))
    flash_window.hides.cache_clear()
    try:
        assert not flash_window.hides(q.device, q.dtype, HEAD)
        found = attention.forward(q, k, v, None, 4, (-2, 0))
        gradient = torch.randn_like(found[0])
        made = attention.backward(gradient, q, k, v, *found, None, 4, (-2, 0))
    finally:
        flash_window.hides.cache_clear()
    wanted = plain_attention.forward(q, k, v, bands(5, 9, 2), False, None)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(made, plain_attention.backward(gradient, q, k, v, *wanted, bands(5, 9, 2), False, None))
