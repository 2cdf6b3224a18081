"""cuDNN's attention without a CUDA device: which calls it gets, in which layouts, and when another kernel takes its place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from streamfx.frontend.backend import Compilation
from streamfx.kernels import attention, cuda_attention, cuda_cudnn, flash_window, plain_attention, sdpa
from streamfx.kernels.plain_attention import LAST, BottomRightCausal
from streamfx.torch_private import NoMaskForCudnn
from tests.support import cuda_kernels
from tests.support.cuda_kernels import in_their_place
from tests.support.cuda_reading import plain
from tests.support.tracing import compare_function

aten = torch.ops.aten
WIDTH, GROUPS, HEADS, KEYS = 8, 2, 4, 24


@pytest.fixture
def hopper() -> Iterator[list[tuple[Any, ...]]]:
    """A device that prefers cuDNN, and the calls that its kernels get: which, rows, keys, causal."""
    calls: list[tuple[Any, ...]] = []

    def noted(name: str, function: Any) -> Any:
        def run(*given: Any, **how: Any) -> Any:
            q, k = given[1:3] if "backward" in name else given[:2]
            calls.append((name, q.shape[2], k.shape[2], next(item for item in given[::-1] if isinstance(item, bool))))
            return function(*given, **how)

        return run

    names = {"cudnn": "forward", "cudnn_backward": "backward"}
    with pytest.MonkeyPatch.context() as patch, in_their_place(half=True, cudnn=True):
        for name, function in names.items():
            patch.setattr(cuda_cudnn, function, noted(name, getattr(cuda_cudnn, function)))
        cuda_cudnn.agrees.cache_clear()
        cuda_cudnn.agrees(torch.device("cpu"), torch.float64, WIDTH, WIDTH)
        calls.clear()
        cuda_kernels.PLANS.clear()
        yield calls
    cuda_cudnn.agrees.cache_clear()


def drawn(batch: int, rows: int, keys: int, width: int = WIDTH) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as a model's views have them: heads of one row side by side."""
    torch.manual_seed(0)
    sizes = ((HEADS, rows), (GROUPS, keys), (GROUPS, keys))
    q, k, v = (torch.randn(batch, n, heads, width, dtype=torch.float64).transpose(1, 2) for heads, n in sizes)
    return q, k, v


def checked(q: Tensor, k: Tensor, v: Tensor, first: int) -> None:
    """A chunk's result and gradients against those of plain operators."""
    wanted = plain_attention.forward(q, k, v, None, BottomRightCausal(), None)
    found = attention.forward(q, k, v, None, first, (None, 0))
    torch.testing.assert_close(found, wanted)
    gradient = torch.randn_like(found[0])
    made = attention.backward(gradient, q, k, v, *found, None, first, (None, 0))
    torch.testing.assert_close(made, plain_attention.backward(gradient, q, k, v, *wanted, None, LAST, None))


@pytest.mark.parametrize("batch", [1, 2])
def test_a_chunk_is_a_past_and_a_square_diagonal(batch: int, hopper: list[Any]) -> None:
    q, k, v = drawn(batch, KEYS, KEYS)
    for start, stop in ((0, 8), (8, 16), (16, 24)):
        checked(q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop], start)
    parts = [(8, 8, True), (8, 8, False), (8, 8, True), (8, 16, False), (8, 8, True)]
    assert sorted(hopper) == sorted((name, *part) for name in ("cudnn", "cudnn_backward") for part in parts)


@pytest.mark.parametrize(
    ("rows", "keys", "scale", "width"),
    [(7, 15, None, WIDTH), (8, 15, None, WIDTH), (1, 24, None, WIDTH), (8, 24, -0.5, WIDTH), (8, 24, None, 136)],
)
def test_other_calls_are_left_to_other_kernels(rows: int, keys: int, scale: float | None, width: int, hopper: list[Any]) -> None:
    """Lengths that are no multiples, a negative scale, wide heads."""
    q, k, v = drawn(1, rows, keys, width)
    past = keys - rows
    found = attention.forward(q, k, v, None, past, (None, 0), scale=scale)
    torch.testing.assert_close(found, plain_attention.forward(q, k, v, None, LAST, scale))
    assert not hopper


def test_masks_and_windows_are_left_to_other_kernels(hopper: list[Any]) -> None:
    """A masked backward of cuDNN may return NaN."""
    q, k, v = drawn(1, 8, KEYS)
    bias = torch.zeros(1, 1, 8, KEYS, dtype=torch.float64).masked_fill(torch.arange(KEYS) % 3 == 1, float("-inf"))
    torch.testing.assert_close(attention.forward(q, k, v, bias, None, None), plain_attention.forward(q, k, v, bias, False, None))
    windowed = attention.forward(q, k, v, None, 16, (-5, 0))
    torch.testing.assert_close(windowed, plain_attention.forward(q, k, v, None, BottomRightCausal(5), None))
    assert not hopper


def switched_off(how: str, patch: pytest.MonkeyPatch) -> None:
    if how == "switched off":
        patch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: False)
    elif how == "deterministic":
        patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    else:
        patch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA3")


@pytest.mark.parametrize("how", ["switched off", "deterministic", "FlashAttention-3 is active"])
def test_what_the_user_chose_is_obeyed(how: str, hopper: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    switched_off(how, monkeypatch)
    q, k, v = drawn(1, 8, KEYS)
    checked(q, k, v, 16)
    assert not hopper


@pytest.mark.parametrize("batch", [1, 2])
def test_a_plan_for_another_layout_is_never_met(batch: int, hopper: list[Any]) -> None:
    """Results and gradients come in many layouts: rows of a whole result, heads first, expanded numbers."""
    q, k, v = drawn(batch, 8, 8)
    found = plain_attention.forward(q, k, v, None, True, None)
    gradient = torch.randn_like(found[0])
    wanted = plain_attention.backward(gradient, q, k, v, *found, None, True, None)

    def of_longer(item: Tensor) -> Tensor:
        longer = item.new_zeros(*item.shape[:2], 3 * item.shape[2], *item.shape[3:])
        longer[:, :, 8:16] = item
        return longer[:, :, 8:16]

    layouts = (
        lambda item: item,
        of_longer,
        lambda item: item.transpose(1, 2).contiguous().transpose(1, 2) if item.dim() == 4 else item,
        lambda item: item.transpose(0, 1).contiguous().transpose(0, 1),
    )
    for layout in layouts:
        given = layout(gradient), q, k, v, layout(found[0]), layout(found[1])
        torch.testing.assert_close(cuda_attention.backward(*given, None, True, None), wanted)
    assert len(hopper) == len(layouts) and len(cuda_kernels.PLANS) == 1
    expanded = torch.ones(1, 1, 1, 1, dtype=torch.float64).expand_as(gradient)
    made = cuda_attention.backward(expanded, q, k, v, *found, None, True, None)
    torch.testing.assert_close(made, plain_attention.backward(expanded, q, k, v, *found, None, True, None))


def test_a_plan_of_the_users_own_call_is_never_met(hopper: list[Any]) -> None:
    """Eager's call of one sequence, whose gradient lies in another way, has the same queries, keys and values."""
    q, k, v = drawn(1, 8, 8)
    out, lse = plain(q, k, v, None, True, None)
    gradient = torch.randn_like(out).contiguous()
    seed = torch.zeros((), dtype=torch.int64)
    ends = None, None, 8, 8
    cuda_kernels.cudnn_backward(gradient, q, k, v, out, lse.unsqueeze(-1), seed, seed, None, *ends, 0.0, True)
    wanted = plain_attention.backward(gradient, q, k, v, out, lse, None, True, None)
    torch.testing.assert_close(cuda_attention.backward(gradient, q, k, v, out, lse, None, True, None), wanted)


def test_gradients_of_many_keys_take_several_calls(hopper: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the gradients of all heads that share a key exist for some keys at a time."""
    q, k, v = drawn(1, 8, KEYS)
    monkeypatch.setattr(cuda_attention, "EXPANDED", 6 * 2 * q[:, :, 0].nbytes)
    checked(q, k, v, 16)
    backward = [call for call in hopper if call[0] == "cudnn_backward"]
    assert sum(keys for _, _, keys, _ in backward) == KEYS and all(keys % 4 == 0 for _, _, keys, _ in backward)


@pytest.mark.parametrize(("groups", "length"), [(4, 32), (2, 36), (1, 19)])
def test_programs_stream(groups: int, length: int, hopper: list[Any]) -> None:
    def function(x: Tensor) -> Tensor:
        q, k, v = x.unflatten(-1, (-1, WIDTH)).transpose(1, 2).split((HEADS, groups, groups), 1)
        if isinstance(x, torch._subclasses.FakeTensor | torch._subclasses.functional_tensor.FunctionalTensor):
            out = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False)[0]
        else:
            out = plain(q, k, v, None, True, None)[0]
        return (out * torch.linspace(0.5, 1.5, WIDTH, dtype=x.dtype)).pow(2).sum()

    torch.manual_seed(0)
    x = torch.randn(2, length, (HEADS + 2 * groups) * WIDTH, dtype=torch.float64, requires_grad=True)
    compare_function(function, [x], (8, 12, length), streams=True, attention={"causal"})
    assert {causal for *_, causal in hopper} == {True, False}


@pytest.mark.parametrize("fault", ["refuses", "aligned at the last row", "another gradient", "no gradient"])
def test_kernels_that_are_wrong_are_not_called(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, real_backward = cuda_cudnn.forward, cuda_cudnn.backward

    def forward(q: Tensor, k: Tensor, v: Tensor, causal: Any, scale: float | None) -> Any:
        if fault == "refuses":
            raise RuntimeError("cuDNN Frontend error: No valid engine configs")
        if fault == "aligned at the last row" and not causal:
            return plain(q, k, v, None, True, scale, last=True)
        return real(q, k, v, causal, scale)

    def backward(*given: Any) -> Any:
        dq, dk, dv = real_backward(*given)
        return dq, dk * (1.1 if fault == "another gradient" else torch.nan if fault == "no gradient" else 1), dv

    cuda_cudnn.agrees.cache_clear()
    with in_their_place(half=True, cudnn=True):
        monkeypatch.setattr(cuda_cudnn, "forward", forward)
        monkeypatch.setattr(cuda_cudnn, "backward", backward)
        assert not cuda_cudnn.agrees(torch.device("cpu"), torch.float64, WIDTH, WIDTH)
        assert not cuda_cudnn.takes(*drawn(1, 8, 8), None, True, None)
        assert sdpa.aligns_last(*drawn(1, 8, KEYS), None, LAST)
    cuda_cudnn.agrees.cache_clear()


def test_flash_attention_3_takes_the_place_of_both(hopper: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Activated by PyTorch's own call, it answers flash attention's operators (torch/nn/attention/_fa3.py); it is asked for a
    chunk
    in one call, whose mask ends at the last row, and tried anew for windows.
    """
    flash, calls = cuda_attention._flash_block, list[tuple[int, int]]()

    def noted(*given: Any) -> Any:
        calls.append((given[1].shape[2], given[2].shape[2]))
        return flash(*given)

    class Handle:
        def remove(self) -> None: ...

    monkeypatch.setattr(cuda_attention, "_flash_block", noted)
    attention_of = torch.nn.attention
    attention_of.register_flash_attention_impl("stand-in", register_fn=Handle)
    tried = len(flash_window.hides._known)
    attention_of.activate_flash_attention_impl("stand-in")
    try:
        q, k, v = drawn(1, 8, KEYS)
        checked(q, k, v, 16)
        assert not hopper and calls == [(8, KEYS)]
        attention.forward(q, k, v, None, 16, (-5, 0))
        assert len(flash_window.hides._known) == tried + 1
    finally:
        attention_of.restore_flash_attention_impl()
    checked(q, k, v, 16)
    assert hopper and calls == [(8, KEYS)]


@pytest.mark.parametrize(("masked", "by_name"), [(False, True), (True, True), (True, False)])
def test_the_operator_is_switched_off_while_a_mask_is_traced(
    masked: bool, by_name: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets -65504 for what a boolean mask hides (2.11); what is planned meanwhile finds it as the user has it."""
    flags, planned, traced = torch.backends.cuda, list[bool](), list[bool]()
    plain = Compilation.partition

    def partition(self: Compilation, *given: Any, **more: Any) -> Any:
        planned.append(flags.cudnn_sdp_enabled())
        return plain(self, *given, **more)

    def switched(on: bool) -> None:
        traced.append(on)
        switch(on)

    def model(q: Tensor, mask: Tensor) -> Tensor:
        if masked and not by_name:
            return F.scaled_dot_product_attention(q, q, q, mask).sum()
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask if masked else None, is_causal=not masked).sum()

    switch = flags.enable_cudnn_sdp
    monkeypatch.setattr(Compilation, "partition", partition)
    monkeypatch.setattr(flags, "enable_cudnn_sdp", switched)
    q, mask = torch.randn(1, 2, 64, 8, requires_grad=True), torch.ones(64, 64, dtype=torch.bool).tril()
    torch.compile(model, backend="streambp")(q, mask).backward()
    assert planned == [True] and flags.cudnn_sdp_enabled()
    assert (traced[:2] == [False, True]) if masked else not traced


def test_a_user_who_allows_cudnn_alone_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    q, mask = torch.randn(1, 2, 4, 8), torch.ones(4, 4, dtype=torch.bool).tril()
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]), NoMaskForCudnn():
        monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", lambda on: pytest.fail("the user's choice is changed"))
        F.scaled_dot_product_attention(q, q, q, mask)
        monkeypatch.undo()
    assert torch.backends.cuda.cudnn_sdp_enabled()
