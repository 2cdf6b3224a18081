"""Fused attention of CUDA, without a CUDA device: stand-ins with the kernels' contracts run in the kernels' places.

What is tested is all but the kernels' arithmetic: recognising their operators, and calling them on chunks in the way that they
can be called (`tests/support/cuda_kernels.py`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from streamfx.cost.meter import Meter
from streamfx.dialect.products import ADD_PRODUCT
from streamfx.kernels import chunk_attention, cuda_attention, cuda_products, efficient_bottom_right, flash_window, sdpa
from streamfx.kernels.attention_call import BOTTOM_RIGHT, AttentionCall
from streamfx.torch_private import FakeTensorMode
from tests.support.calls import noted
from tests.support.cuda_kernels import Heads, another_gradient, check, check_kernels, drawn, in_their_place, refuses, wrong
from tests.support.cuda_reading import plain
from tests.support.tables import listed_cases, named_cases
from tests.support.tracing import compare_function, traced

aten = torch.ops.aten
HEAD = 8


@pytest.fixture
def half() -> Iterator[None]:
    with in_their_place(half=True):
        yield


def as_flash(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> Tensor:
    assert bias is None
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False)[0]  # type: ignore[no-any-return]


def as_efficient(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> Tensor:
    """With its bias prepared as `scaled_dot_product_attention` does."""
    k, v = (item.repeat_interleave(q.shape[1] // item.shape[1], 1) for item in (k, v))
    if bias is not None:
        keys = k.shape[2]
        bias = F.pad(bias, (0, -keys % 16))[..., :keys].expand(*q.shape[:3], keys)  # attention.cpp: pad_bias
    return aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, causal)[0]  # type: ignore[no-any-return]


def as_cudnn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> Tensor:
    return aten._scaled_dot_product_cudnn_attention(q, k, v, bias, True, 0.0, causal, False)[0]  # type: ignore[no-any-return]


def attended(operator: Callable[..., Tensor], x: Tensor, groups: int, bias: Tensor | None, causal: bool) -> Tensor:
    """One tensor [B, T, (heads + 2 groups) D] to a number; eager uses plain attention."""
    q, k, v = x.unflatten(-1, (-1, HEAD)).transpose(1, 2).split((4, groups, groups), 1)
    is_traced = isinstance(x, torch._subclasses.FakeTensor | torch._subclasses.functional_tensor.FunctionalTensor)
    out = operator(q, k, v, bias, causal) if is_traced else plain(q, k, v, bias, causal, None)[0]
    return (out * torch.linspace(0.5, 1.5, HEAD, dtype=x.dtype)).pow(2).sum()


def triangle(length: int) -> Tensor:
    return torch.arange(length)[None] <= torch.arange(length)[:, None]


def window(length: int) -> Tensor:
    return triangle(length) & (torch.arange(length)[None] > torch.arange(length)[:, None] - 5)


STREAMS: list[tuple[Any, ...]] = listed_cases("streams", globals())


@pytest.mark.parametrize(("operator", "mask", "causal", "verdict", "half", "groups", "length"), STREAMS)
def test_kernels_stream(operator: Any, mask: Any, causal: bool, verdict: str, half: bool, groups: int, length: int) -> None:
    def function(x: Tensor) -> Tensor:
        zeros = torch.zeros(length, length, dtype=x.dtype)
        bias = None if mask is None else zeros.masked_fill(~mask(length), float("-inf"))
        return attended(operator, x, groups, bias, causal)

    torch.manual_seed(0)
    x = torch.randn(2, length, (4 + 2 * groups) * HEAD, dtype=torch.float64, requires_grad=True)
    with in_their_place(half):
        compare_function(function, [x], (5, 1, length), streams=True, attention={verdict})


def test_masks_that_depend_on_data_stream(half: None) -> None:
    """Padding on the left, packed documents, and rows that see some of the keys: tiles of all kinds."""
    torch.manual_seed(0)
    length = 67
    document = torch.arange(length) // 23
    eye = torch.eye(length, dtype=torch.bool)
    padded = triangle(length) & (torch.arange(length) >= 9) | eye
    some = triangle(length) & (torch.rand(length) < 0.7) | eye
    seen = torch.stack([padded, triangle(length) & (document == document[:, None]), some])
    mask = torch.zeros(3, 1, length, length, dtype=torch.float64).masked_fill(~seen[:, None], float("-inf"))
    x = torch.randn(3, length, 12 * HEAD, dtype=torch.float64, requires_grad=True)
    compare_function(lambda x, mask: attended(as_efficient, x, 4, mask, False), [x, mask], (20, length), streams=True)


REFUSED: dict[str, Callable[..., Tensor]] = named_cases("refusals", globals(), "q, k, v, bias")


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_attention_keeps_its_operator(name: str, half: None) -> None:
    """The stand-ins support neither, so they raise."""

    def function(x: Tensor, bias: Tensor) -> Tensor:
        return REFUSED[name](*(item[:, None] for item in x.unflatten(-1, (3, HEAD)).unbind(2)), bias).sum()

    x = torch.randn(2, 16, 3 * HEAD, dtype=torch.float64, requires_grad=True)
    with pytest.raises(AssertionError):
        traced(function, [x, torch.randn(16, 16, dtype=torch.float64, requires_grad=True)])


# -- chunks


@pytest.mark.parametrize("half", [True, False], ids=["flash", "efficient"])
@pytest.mark.parametrize("width", [HEAD, 5])
def test_a_chunk_takes_one_call(width: int, half: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a kernel whose causal mask ends at the last row and key; nothing is merged or joined."""
    calls = noted(monkeypatch, flash_window, "forward", lambda call: (call.query.shape[2], call.key.shape[2]))
    monkeypatch.setattr(chunk_attention, "_merge", None)
    q, k, v = drawn(2, 21, 21, width=width)
    with in_their_place(half):
        sdpa.KERNELS["cpu"] = sdpa.KERNELS["cpu"]._replace(forward=flash_window.forward)
        for start, stop in ((0, 8), (8, 16), (16, 21), (20, 21)):
            heads = q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop]
            check(chunk_attention, heads, (None, start, (None, 0)), (None, BOTTOM_RIGHT, None))
    assert calls == [(8, 8), (8, 16), (5, 21), (1, 21)]


@pytest.mark.parametrize(
    ("rows", "keys", "causal"),
    [(8, 40, BOTTOM_RIGHT), (8, 40, False), (1, 9, BOTTOM_RIGHT), (8, 13, BOTTOM_RIGHT), (20, 21, False)],
)
def test_many_keys_take_several_calls(rows: int, keys: int, causal: Any, half: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where heads share keys, the kernel makes the gradients of all heads before it adds them up."""
    calls = noted(monkeypatch, cuda_attention, "_flash_tile", lambda call, *_: call.key.shape[2])
    heads = drawn(2, rows, keys)
    monkeypatch.setattr(cuda_attention, "MAX_EXPANDED_BYTES", 6 * 2 * heads[0][:, :, 0].nbytes)
    check_kernels(AttentionCall(*heads, causal=causal))
    assert sum(calls) == keys and len(calls) >= 1 + (keys > rows + 6) and max(calls) <= max(6, rows) + rows


BLOCKED = listed_cases("masks in blocks", globals())


@pytest.mark.parametrize(("count", "groups", "causal", "rows", "keys"), BLOCKED)
def test_many_rows_take_several_calls(
    count: int, groups: int, causal: Any, rows: int, keys: int, half: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel sums the queries' gradient in single precision, and makes that of keys for all heads: those of a block alone."""
    calls = noted(monkeypatch, cuda_attention, "_flash_tile", lambda call, *_: (*call.query.shape[1:3], call.key.shape[2]))
    monkeypatch.setattr(cuda_attention, "MAX_ACCUMULATOR_BYTES", 2 * (count // groups) * 8 * (1 + HEAD) * 4)
    check_kernels(AttentionCall(*drawn(2, rows, keys, count, groups), causal=causal))
    assert len(calls) > 1 and all(own == count // groups and size <= 8 and seen <= 16 for own, size, seen in calls)
    pairs = sum(size * seen for _, size, seen in calls) // groups
    assert pairs < rows * keys or not causal or keys > rows  # keys that no row sees are omitted


def test_a_top_left_causal_mask_over_more_keys_is_exact(half: None) -> None:
    """With more keys than rows flash attention's mask begins elsewhere: another kernel takes them."""
    check_kernels(AttentionCall(*drawn(2, 5, 9), causal=True))


@pytest.mark.parametrize("bias", [None, torch.zeros(1, 1, 9, 9, dtype=torch.bfloat16)], ids=["flash", "efficient"])
def test_merged_results_have_the_type_of_the_kernel(bias: Tensor | None, half: None) -> None:
    q, k, v = (item.bfloat16() for item in drawn(2, 9, 9, groups=4))
    call = AttentionCall(q, k, v, bias)
    out, lse = cuda_attention.forward(call)
    made = cuda_attention.backward(call, torch.ones_like(out).float(), out.float(), lse)
    assert [part.dtype for part in made] == [torch.bfloat16] * 3


# -- windows


def bands(rows: int, keys: int, low: int, high: int = 0) -> Tensor:
    """A bias that shows keys i + keys - rows + low .. i + keys - rows + high."""
    delta = torch.arange(keys) - torch.arange(rows)[:, None] - keys + rows
    hidden = (delta > high) | (delta < low)
    return torch.zeros(1, 1, rows, keys, dtype=torch.float64).masked_fill(hidden, float("-inf"))


def check_window(heads: Heads, low: int | None, high: int = 0) -> None:
    rows, keys = heads[0].shape[2], heads[1].shape[2]
    bias = bands(rows, keys, -keys if low is None else low, high)
    check(chunk_attention, heads, (None, keys - rows, (low, high)), (bias, False, None))


@pytest.mark.parametrize(("rows", "keys", "left"), [(8, 12, 4), (1, 5, 4), (1, 1, 0), (5, 11, 0), (3, 9, 8), (3, 9, 1 << 40)])
@pytest.mark.parametrize(("width", "is_half"), [(HEAD, True), (5, False)], ids=["flash", "efficient"])
def test_a_window_takes_one_call_without_a_bias(
    rows: int, keys: int, left: int, width: int, is_half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with in_their_place(is_half):
        for name in ("forward", "backward"):
            monkeypatch.setattr(cuda_attention, name, lambda *_: pytest.fail("a kernel with a bias was called"))
        check_window(drawn(2, rows, keys, width=width), -left)


def at_the_first(real: Any, call: AttentionCall, left: int) -> Any:
    return plain(*call[:3], None, True, call.scale)


def one_key_more(real: Any, call: AttentionCall, left: int) -> Any:
    return real(call, left + 1)


FAULTS = [(refuses, None), (at_the_first, None), (one_key_more, None), (None, another_gradient)]


@pytest.mark.parametrize("left", [None, -2])
@pytest.mark.parametrize(("fault", "back"), FAULTS, ids=lambda fault: getattr(fault, "__name__", "-"))
def test_kernels_with_another_mask_alignment_are_not_called(fault: Any, back: Any, left: int | None) -> None:
    """The past and the diagonal are then two calls, and a window is a bias: kernels are tried on a few rows, once."""
    heads = drawn(1, 5, 9, groups=4)
    with (
        in_their_place(half=False),
        wrong(efficient_bottom_right.masks_correctly, efficient_bottom_right, ("forward", "backward"), fault, back),
    ):
        is_right = fault is one_key_more and left is None
        assert efficient_bottom_right.masks_correctly(heads[0].device, heads[0].dtype, HEAD, left is not None) == is_right
        check_window(heads, left)


@pytest.mark.parametrize(("fault", "back"), [FAULTS[0], *FAULTS[2:]], ids=lambda fault: getattr(fault, "__name__", "-"))
def test_kernels_without_windows_are_not_called(fault: Any, back: Any, half: None) -> None:
    heads = drawn(1, 5, 9, groups=4)
    with wrong(flash_window.masks_correctly, flash_window, ("_flash", "_flash_backward"), fault, back):
        assert not flash_window.masks_correctly(heads[0].device, heads[0].dtype, HEAD)
        check_window(heads, -2)


# -- products that are added to a total of another type

HALF = torch.bfloat16


@contextmanager
def stand_ins(takes_other_totals: bool) -> Iterator[list[str]]:
    """cuda/Blas.cpp: _mm_dtype_out_cuda, _addmm_dtype_out_cuda; which totals are taken depends on the version of PyTorch."""
    called: list[str] = []

    def product(left: Tensor, right: Tensor, out_dtype: torch.dtype) -> Tensor:
        called.append("product")
        assert left.dtype == right.dtype == HALF and out_dtype == torch.float32
        return left.float() @ right.float()

    def added(total: Tensor, left: Tensor, right: Tensor, out_dtype: torch.dtype, *, out: Tensor, **factors: Any) -> Tensor:
        called.append("added")
        assert left.dtype == right.dtype == HALF and not factors
        if out_dtype != out.dtype or out.shape != (*left.shape[:-1], right.shape[-1]):
            raise RuntimeError("out_dtype must be the same as the dtype of the provided out tensor")
        if total.dtype != left.dtype and not takes_other_totals:
            raise RuntimeError("self and mat2 must have the same dtype")
        return out.copy_(total + left.float() @ right.float())

    def written(left: Tensor, right: Tensor, out_dtype: torch.dtype, *, out: Tensor) -> Tensor:
        called.append("written")
        assert left.dtype == right.dtype == HALF and out_dtype == out.dtype
        return out.copy_(left.float() @ right.float())

    library = torch.library.Library("aten", "IMPL")
    for name, function in {"mm.dtype": product, "mm.dtype_out": written, "addmm.dtype_out": added}.items():
        library.impl("baddbmm.dtype_out" if function is added else f"b{name}", function, "CPU")
        library.impl(name, function, "CPU")
    cuda_products.adds_in_place.cache_clear()
    try:
        yield called
    finally:
        library._destroy()
        cuda_products.adds_in_place.cache_clear()


@pytest.mark.parametrize("takes_other_totals", [True, False])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_a_product_is_added_to_a_wider_total(batch: tuple[int, ...], takes_other_totals: bool) -> None:
    """In place where it can be; the other way where it cannot, and not by trying at each product."""
    left, right = torch.randn(*batch, 5, 7).to(HALF), torch.randn(*batch, 7, 4).to(HALF)
    total = torch.full((*batch, 5, 4), torch.nan)  # the first part overwrites the total
    with stand_ins(takes_other_totals) as called:
        for is_first in (True, False, False):
            ADD_PRODUCT(total, left, right, is_first)
    torch.testing.assert_close(total, 3 * (left.float() @ right.float()))
    tried = 4 if takes_other_totals else 2
    assert called[tried:] == (["written", "added", "added"] if takes_other_totals else ["product"] * 3)


def test_adding_a_product_takes_no_memory() -> None:
    with FakeTensorMode():
        total, left, right = torch.zeros(64, 32), torch.zeros(64, 16, dtype=HALF), torch.zeros(16, 32, dtype=HALF)
        with Meter() as meter:
            ADD_PRODUCT(total, left, right, False)
    assert (meter.peak, meter.flops, meter.moved) == (0, 2 * 64 * 16 * 32, 0)
