"""Bytes and kernels of fused element-wise work, counted by hand; seconds of attention by the kernel that computes it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: F401  (in tests/tables)
from torch import Tensor

from streamfx.cost.kernels import kernel_of
from streamfx.cost.meter import Meter
from streamfx.cost.work import ATTENTION, Work, total_work
from streamfx.kernels.device_kinds import pretend_device
from streamfx.tools.planner.devices import device_by_name
from streamfx.torch_private import FakeTensorMode
from tests.support.tables import named_cases

ROWS, WIDTH, INNER = 64, 8, 32
X, ROW = 4 * ROWS * WIDTH, 4 * ROWS * INNER  # bytes of an input, and of a value between


def held(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    s = (x @ a).relu()
    return s, (s + 1) @ b


def dropped(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    (x + 1).relu()
    return x @ a


def repeated(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    for _ in range(20):
        x = ((x @ a).relu() + 1) @ b
    return x


# of x [rows width] and two weights: bytes that fused kernels move, and kernels
FUSED: dict[str, tuple[Callable[..., Any], int, int]] = named_cases("fused kernels", globals())


@pytest.mark.parametrize("what", FUSED)
def test_fused_kernels_are_counted_with_their_bytes(what: str) -> None:
    function, fused, kernels = FUSED[what]
    with FakeTensorMode():
        tensors = torch.empty(ROWS, WIDTH), torch.empty(WIDTH, INNER), torch.empty(INNER, WIDTH)
        with Meter() as meter:
            out = function(*tensors)
            meter.flush()
        del out
    work = meter.work
    assert (work.fused, work.kernels) == (fused, kernels)
    assert work.compiled.moved == work.fused and work.compiled.flops == work.flops and work.moved >= fused


@pytest.mark.parametrize(
    ("device", "name", "masked", "width", "kernel"),
    [
        ("H100", "aten::_scaled_dot_product_flash_attention_for_cpu", True, 128, "cudnn"),  # the mask is a flag on CUDA
        ("H100", "aten::_scaled_dot_product_flash_attention_for_cpu", False, 256, "flash"),
        ("A100", "aten::_scaled_dot_product_flash_attention_for_cpu", False, 128, "flash"),
        ("H100", "aten::_scaled_dot_product_cudnn_attention", False, 128, "cudnn"),
        ("H100", "aten::_scaled_dot_product_efficient_attention", False, 128, ""),
        ("H100", "streamfx::attention", False, 128, "cudnn"),
        ("H100", "streamfx::attention", True, 128, ""),
    ],
)
def test_attention_is_attributed_to_its_kernel(device: str, name: str, masked: bool, width: int, kernel: str) -> None:
    with FakeTensorMode(), pretend_device(device_by_name(device).kind):
        heads = torch.empty(1, 4, 256, width, dtype=torch.bfloat16)
        given = {"query": heads, "key": heads, "value": heads, "attn_mask": torch.empty(256, 256) if masked else None}
        assert kernel_of(name, given) == kernel


def test_seconds_depend_on_the_kernel() -> None:
    card, other = device_by_name("H100"), device_by_name("L40S")
    attention = Work(flops=100, attention_flops=40, cudnn=30, flash_backward=10)
    expected = 60 / card.flops + 30 / card.attention["cudnn"] + 10 / card.attention["flash_backward"]
    assert card.seconds(attention) == pytest.approx(expected) and other.seconds(attention) == pytest.approx(100 / other.flops)
    assert set(card.attention) == set(ATTENTION)
    found = Work(flops=100, attention_flops=40, masked_flops=40, cudnn=30, flash=10).without_hidden(20)
    assert (found.flops, found.attention_flops, found.cudnn, found.flash) == (80, 20, 15, 5), "hidden pairs, of every kernel"
    assert total_work([found, found]).cudnn == 30
