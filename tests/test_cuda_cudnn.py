"""cuDNN's attention without a CUDA device: which calls it gets, in which layouts, and when another kernel takes its place."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from streamfx.frontend.backend import Compilation
from streamfx.kernels import chunk_attention, cuda_attention, cuda_cudnn, flash_window, plain_attention, sdpa
from streamfx.kernels.plain_attention import BOTTOM_RIGHT, BottomRightCausal
from streamfx.torch_private import NoMaskForCudnn
from tests.support import cuda_kernels
from tests.support.calls import noted
from tests.support.cuda_kernels import another_gradient, check, drawn, in_their_place, refuses, wrong
from tests.support.cuda_reading import plain
from tests.support.tracing import compare_function
from tests.test_cuda_kernels import as_cudnn, attended

WIDTH, KEYS = 8, 24
CPU = torch.device("cpu")


def shape_of_call(*given: Any) -> tuple[int, int, bool]:
    """Rows, keys, and whether there is a causal mask."""
    q, k = given[1:3] if len(given) > 5 else given[:2]
    return q.shape[2], k.shape[2], next(item for item in given[::-1] if isinstance(item, bool))


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
    check(chunk_attention, (q, k, v), (None, first, (None, 0)), (None, BOTTOM_RIGHT, None))


@pytest.mark.parametrize("batch", [1, 2])
def test_a_chunk_is_split_into_past_and_diagonal(batch: int, hopper: list[Any]) -> None:
    q, k, v = drawn(batch, KEYS, KEYS)
    for start, stop in ((0, 8), (8, 16), (16, 24)):
        check_chunk(q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop], start)
    parts = [(8, 8, False), (8, 8, True), (8, 8, True), (8, 8, True), (8, 16, False)]
    assert [sorted(calls) for calls in hopper] == [parts, parts]


BIAS = torch.zeros(1, 1, 8, KEYS, dtype=torch.float64).masked_fill(torch.arange(KEYS) % 3 == 1, float("-inf"))
LEFT: dict[str, tuple[int, int, int, Any, float | None, Any]] = {
    "no multiples": (7, 15, WIDTH, (None, 8, (None, 0)), None, (None, BOTTOM_RIGHT)),
    "keys are no multiple": (8, 15, WIDTH, (None, 7, (None, 0)), None, (None, BOTTOM_RIGHT)),
    "one row": (1, 24, WIDTH, (None, 23, (None, 0)), None, (None, BOTTOM_RIGHT)),
    "a negative scale": (8, 24, WIDTH, (None, 16, (None, 0)), -0.5, (None, BOTTOM_RIGHT)),
    "wide heads": (8, 24, 136, (None, 16, (None, 0)), None, (None, BOTTOM_RIGHT)),
    "a mask, whose backward of cuDNN may return NaN": (8, KEYS, WIDTH, (BIAS, None, None), None, (BIAS, False)),
    "a window": (8, KEYS, WIDTH, (None, 16, (-5, 0)), None, (None, BottomRightCausal(5))),
}


@pytest.mark.parametrize("name", LEFT)
def test_unsupported_calls_use_other_kernels(name: str, hopper: list[Any]) -> None:
    rows, keys, width, how, scale, truth = LEFT[name]
    heads = drawn(1, rows, keys, width=width)
    found = chunk_attention.forward(*heads, *how, scale=scale)
    bias, causal = truth
    torch.testing.assert_close(found, plain_attention.forward(*heads, bias, causal, scale))
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
    out, lse = plain_attention.forward(q, k, v, None, True, None)
    gradient = torch.randn_like(out).contiguous()
    wanted = plain_attention.backward(gradient, q, k, v, out, lse, None, True, None)
    for layout in LAYOUTS:
        given = layout(gradient), q, k, v, layout(out), layout(lse)
        torch.testing.assert_close(cuda_attention.backward(*given, None, True, None), wanted)
    assert len(hopper[1]) == len(LAYOUTS) and len(cuda_kernels.PLANS) == 1
    expanded = torch.ones(1, 1, 1, 1, dtype=torch.float64).expand_as(gradient)
    made = cuda_attention.backward(expanded, q, k, v, out, lse, None, True, None)
    torch.testing.assert_close(made, plain_attention.backward(expanded, q, k, v, out, lse, None, True, None))
    cuda_kernels.PLANS.clear()
    seed = torch.zeros((), dtype=torch.int64)
    as_eager = gradient, q, k, v, plain(q, k, v, None, True, None)[0], lse.unsqueeze(-1), seed, seed
    cuda_kernels.cudnn_backward(*as_eager, None, None, None, 8, 8, 0.0, True)
    torch.testing.assert_close(cuda_attention.backward(gradient, q, k, v, out, lse, None, True, None), wanted)


@pytest.mark.parametrize(("groups", "length"), [(4, 32), (1, 19)])
def test_programs_stream_with_cudnn(groups: int, length: int, hopper: list[Any]) -> None:
    x = torch.randn(2, length, (4 + 2 * groups) * WIDTH, dtype=torch.float64, requires_grad=True)
    compare_function(
        lambda x: attended(as_cudnn, x, groups, None, True), [x], (8, 12, length), streams=True, attention={"causal"}
    )
    assert {is_causal for *_, is_causal in hopper[0]} == {True, False}


def at_the_last(real: Any, q: Tensor, k: Tensor, v: Tensor, causal: Any, scale: float | None) -> Any:
    return real(q, k, v, causal, scale) if causal else plain(q, k, v, None, True, scale, last=True)


def no_gradient(real: Any, *given: Any) -> Any:
    return another_gradient(real, *given, by=torch.nan)


@pytest.mark.parametrize(("fault", "back"), [(refuses, None), (at_the_last, None), (None, another_gradient), (None, no_gradient)])
def test_incorrect_kernels_are_not_called(fault: Any, back: Any) -> None:
    with (
        in_their_place(half=True, cudnn=True),
        wrong(cuda_cudnn.matches_reference, cuda_cudnn, ("forward", "backward"), fault, back),
    ):
        assert not cuda_cudnn.matches_reference(CPU, torch.float64, WIDTH, WIDTH)
        assert not cuda_cudnn.supports(*drawn(1, 8, 8), None, True, None)
        assert sdpa.supports_bottom_right(*drawn(1, 8, KEYS), None, BOTTOM_RIGHT)


def test_flash_attention_3_replaces_both_kernels(hopper: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Activated by PyTorch's own call, it answers flash attention's operators (torch/nn/attention/_fa3.py); it is asked for a
    chunk in one call, whose mask ends at the last row, and tried anew for windows.
    """

    class Handle:
        def remove(self) -> None: ...

    calls = noted(monkeypatch, cuda_attention, "_flash_tile", lambda *given: (given[1].shape[2], given[2].shape[2]))
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

    q, mask = torch.randn(1, 2, 64, 8, requires_grad=True), torch.ones(64, 64, dtype=torch.bool).tril()
    torch.compile(model, backend="streambp")(q, mask).backward()
    assert planned == [True] and flags.cudnn_sdp_enabled()
    assert (traced[:2] == [False, True]) if masked else not traced


def test_cudnn_stays_enabled_if_it_is_the_only_fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    q, mask = torch.randn(1, 2, 4, 8), torch.ones(4, 4, dtype=torch.bool).tril()
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]), NoMaskForCudnn():
        monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", lambda on: pytest.fail("the user's choice is changed"))
        F.scaled_dot_product_attention(q, q, q, mask)
        monkeypatch.undo()
    assert torch.backends.cuda.cudnn_sdp_enabled()
