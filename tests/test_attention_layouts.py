"""Fused attention accepts operands with any memory layout, even if its kernels do not."""

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from streamfx.kernels import plain_attention as plain
from streamfx.kernels import sdpa
from streamfx.kernels.device_kinds import DeviceKind, pretend_device
from tests.support.cuda_kernels import in_their_place
from tests.support.exactness import TOLERANCE, relative_error
from tests.support.tracing import compare_function

aten = torch.ops.aten


def at_an_odd_address(x: Tensor) -> Tensor:
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def within(x: Tensor) -> Tensor:
    """A part of something larger, at odd places of it."""
    room = F.pad(x, (3, 2, 5, 1), value=float("nan"))
    return room[..., 5 : 5 + x.shape[-2], 3 : 3 + x.shape[-1]]


LAYOUTS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.contiguous(),
    lambda x: x.movedim(-2, 0).contiguous().movedim(0, -2),  # by rows
    lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),  # by columns
    within,
    lambda x: torch.stack([x, x * 0, x], -2)[..., 0, :],  # a third of one projection
    at_an_odd_address,
    lambda x: x[:1].expand_as(x),  # the first of the batch for all
]


class Drawn(NamedTuple):
    """Operands of an attention, in some layouts; the causal flag and the scale are drawn as well."""

    heads: tuple[Tensor, Tensor, Tensor]
    gradient: Tensor
    how: tuple[Tensor | None, bool, float | None]
    layouts: list[Callable[[Tensor], Tensor]]

    def by_plain(self) -> list[Tensor]:
        out, lse = plain.forward(*self.heads, *self.how)
        return [out, lse, *plain.backward(self.gradient, *self.heads, out, lse, *self.how)]


def drawn(seed: int) -> Drawn:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def tensor(*shape: int) -> Tensor:
        return draw.choice(LAYOUTS)(torch.randn(*shape, dtype=torch.float64, generator=generator))

    b, m, n = draw.choice([1, 2]), draw.choice([1, 7, 32, 37]), draw.choice([1, 7, 16, 37])
    h, of_keys, of_values = draw.choice([(4, 4, 4), (4, 2, 2), (4, 1, 1), (1, 1, 1), (4, 2, 4)])
    d, e = draw.choice([(8, 8), (8, 8), (16, 8), (8, 16), (5, 5), (12, 20)])
    shapes = [(b, h, m, n), (b, 1, m, n), (1, 1, m, n), (b, h, 1, n), (1, 1, m, 1), (h, m, n), (m, n)]
    bias = tensor(*draw.choice(shapes)) if draw.random() < 0.5 else None
    heads = tensor(b, h, m, d), tensor(b, of_keys, n, d), tensor(b, of_values, n, e)
    how = bias, draw.random() < 0.5, draw.choice([None, None, 0.3, 0.0, -0.5])
    return Drawn(heads, tensor(b, h, m, e), how, [draw.choice(LAYOUTS[:-1]) for _ in range(2)])


def near(found: Sequence[Tensor], wanted: Sequence[Tensor], tolerance: float, seed: int) -> None:
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), found, wanted, strict=True):
        assert relative_error(a.double(), b.double(), floor=1.0) < tolerance, (seed, name, drawn(seed))


def check(seed: int) -> None:
    case = drawn(seed)
    wanted = case.by_plain()
    kept, kept_lse = case.layouts[0](wanted[0]), case.layouts[1](wanted[1][..., None])[..., 0]
    made = sdpa.backward(case.gradient, *case.heads, kept, kept_lse, *case.how)
    near([*sdpa.forward(*case.heads, *case.how), *made], wanted, TOLERANCE, seed)


@pytest.mark.parametrize("device", ["cpu", "half", "single"])
def test_attention_is_exact_for_any_memory_layout(device: str) -> None:
    with nullcontext() if device == "cpu" else in_their_place(half=device == "half"):
        for seed in range(150):
            check(seed)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.05), (torch.float16, 0.01), (torch.float32, 1e-5)])
def test_attention_is_as_exact_as_its_type_allows(dtype: torch.dtype, tolerance: float) -> None:
    """Log-sum-exps are float32; biases have the type of the queries."""
    with in_their_place(half=True):
        for seed in range(40):
            case = drawn(seed)
            q, k, v, gradient = (item.to(dtype) for item in (*case.heads, case.gradient))
            out, lse = sdpa.forward(q, k, v, *case.how)
            found = sdpa.backward(gradient, q, k, v, out, lse, *case.how)
            assert lse.dtype == torch.float32 and {item.dtype for item in (out, *found)} == {dtype}
            near([out, lse, *found], case.by_plain(), tolerance, seed)


def test_plain_attention_matches_autograd() -> None:
    for seed in range(20):
        case = drawn(seed)
        (bias, causal, scale), leaves = case.how, [item.detach().clone().requires_grad_() for item in case.heads]
        query, key, value = leaves
        key, value = (item.repeat_interleave(query.shape[1] // item.shape[1], 1) for item in (key, value))
        scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
        scores = scores if bias is None else scores + bias
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, float("-inf")) if causal else scores
        truth = scores.softmax(-1) @ value
        gradients = torch.autograd.grad(truth, leaves, case.gradient)
        near(case.by_plain(), [truth.detach(), scores.logsumexp(-1).detach(), *gradients], TOLERANCE, seed)


@pytest.mark.parametrize(("capability", "is_plain"), [((7, 5), True), ((8, 0), False)])
def test_types_without_a_kernel_run_plain_attention(capability: tuple[int, int], is_plain: bool) -> None:
    """Turing's kernels know float16 and float32 alone, and refuse; no kernel of CUDA knows float64."""
    types = torch.bfloat16, torch.float16, torch.float32, torch.float64
    with pretend_device(DeviceKind("cuda", capability, True)):
        chosen = [sdpa._kernels(torch.empty(1, dtype=dtype)) for dtype in types]
    assert [one is sdpa.PLAIN for one in chosen] == [is_plain, False, False, True]


def test_causal_flash_attention_over_more_keys_falls_back() -> None:
    """Its causal mask ends at the last row and key, where all others begin at the first."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        q, k, v = (item.unflatten(-1, (2, 8)).transpose(1, 2) for item in (x, y, y * y))
        out: Tensor = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False)[0]
        return out.pow(2).sum()

    inputs = [torch.randn(2, n, 16, dtype=torch.float64, requires_grad=True) for n in (9, 25)]
    with in_their_place(half=True):
        compare_function(function, inputs, (5,))


@pytest.mark.parametrize("scale", [-0.4, 0.0])
def test_a_causal_mask_with_a_negative_scale_is_exact(scale: float) -> None:
    """The kernel's causal flag masks before scaling, which gives NaN here; eager adds its mask after scaling."""

    def function(x: Tensor) -> Tensor:
        q, k, v = (item.unflatten(-1, (2, 8)).transpose(1, 2) for item in x.chunk(3, -1))
        mask = torch.arange(x.shape[1]) <= torch.arange(x.shape[1])[:, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).pow(2).sum()

    x = torch.randn(2, 17, 48, dtype=torch.float64, requires_grad=True)
    compare_function(function, [x], (5, 17), streams=True, attention={"causal"})


def test_a_row_that_sees_no_key_has_no_weights() -> None:
    q, k, v, gradient = torch.randn(4, 1, 2, 5, 4, dtype=torch.float64)
    bias = torch.zeros(1, 1, 5, 5, dtype=torch.float64).index_fill(2, torch.tensor(3), float("-inf"))
    out, lse = plain.forward(q, k, v, bias, False, None)
    made = plain.backward(gradient, q, k, v, out, lse, bias, False, None)
    assert all(item.isfinite().all() for item in (out, *made))
    assert not out[:, :, 3].any() and not made[0][:, :, 3].any()
