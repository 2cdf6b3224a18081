"""Bytes and kernels of fused element-wise work, counted by hand; seconds of attention by the kernel that computes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from streamfx.cost.kernels import kernel_of
from streamfx.cost.meter import Meter
from streamfx.cost.work import ATTENTION, Work, summed
from streamfx.kernels.device_kinds import supposed
from streamfx.tools.planner.devices import device_called
from streamfx.torch_private import FakeTensorMode

ROWS, WIDTH, INNER = 64, 8, 32
X, ROW = 4 * ROWS * WIDTH, 4 * ROWS * INNER  # bytes of an input, and of a value between


def work_of(function: Callable[..., Any]) -> tuple[Work, Any]:
    """The work of a function of x [rows width] and two weights, and what it returned."""
    with FakeTensorMode():
        x, a, b = torch.empty(ROWS, WIDTH), torch.empty(WIDTH, INNER), torch.empty(INNER, WIDTH)
        with Meter() as meter:
            out = function(x, a, b)
            meter.flush()
    return meter.work, out


def test_what_only_element_wise_work_reads_is_never_written() -> None:
    def gated(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return (F.silu(x @ a) * (x @ a)) @ b

    work, _ = work_of(gated)
    assert (work.fused, work.kernels) == (3 * ROW, 4)  # two values read, their product written; three products
    assert (work.moved, work.launches) == (5 * ROW, 5)
    assert work.compiled.moved == work.fused and work.compiled.flops == work.flops


def test_what_somebody_holds_is_written() -> None:
    def held(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        s = (x @ a).relu()
        return s, (s + 1) @ b

    work, _ = work_of(held)
    assert work.fused == 3 * ROW  # the first product is read, both values behind it are written


def test_a_value_is_read_once_by_a_kernel() -> None:
    work, _ = work_of(lambda x, a, b: ((x + 1) * (x - 1) + x) @ a)
    assert work.fused == 2 * X


def test_what_nobody_reads_costs_nothing() -> None:
    def dropped(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        (x + 1).relu()
        return x @ a

    work, _ = work_of(dropped)
    assert (work.fused, work.kernels) == (0, 1)


def test_results_are_written_at_the_end() -> None:
    work, _ = work_of(lambda x, a, b: (x + 1).relu())
    assert (work.fused, work.kernels) == (2 * X, 1)


def test_operators_in_place_are_not_fused() -> None:
    """The runtime calls them one by one. A copy reads its source and writes; a sum reads both and writes."""

    def added(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        total = torch.empty_like(x)
        total.copy_(x * 2)
        return total.add_(x)

    work, _ = work_of(added)
    assert work.fused == 2 * X + 2 * X + 3 * X


def test_rows_that_are_added_to_others_are_counted_alone() -> None:
    with FakeTensorMode():
        total, rows, index = torch.empty(1 << 20, 4), torch.empty(8, 4), torch.zeros(8, dtype=torch.int64)
        with Meter() as meter:
            total.index_add_(0, index, rows)
    assert meter.work.moved == 3 * 8 * 4 * 4


def test_memory_that_is_taken_again_is_another_value() -> None:
    """Storages are known by their addresses, which come back."""

    def repeated(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        for _ in range(20):
            x = ((x @ a).relu() + 1) @ b
        return x

    work, _ = work_of(repeated)
    assert work.fused == 20 * 2 * ROW


@pytest.mark.parametrize(
    ("device", "name", "masked", "width", "kernel"),
    [
        ("H100", "aten::_scaled_dot_product_flash_attention_for_cpu", True, 128, "cudnn"),  # the mask is a flag on CUDA
        ("H100", "aten::_scaled_dot_product_flash_attention_for_cpu", False, 256, "flash"),
        ("A100", "aten::_scaled_dot_product_flash_attention_for_cpu", False, 128, "flash"),
        ("H100", "aten::_scaled_dot_product_flash_attention", False, 128, "flash"),
        ("H100", "aten::_scaled_dot_product_cudnn_attention", False, 128, "cudnn"),
        ("H100", "aten::_scaled_dot_product_efficient_attention", False, 128, ""),
        ("H100", "streamfx::attention", False, 128, "cudnn"),
        ("H100", "streamfx::attention", True, 128, ""),
    ],
)
def test_attention_is_counted_by_its_kernel(device: str, name: str, masked: bool, width: int, kernel: str) -> None:
    with FakeTensorMode(), supposed(device_called(device).kind):
        heads = torch.empty(1, 4, 256, width, dtype=torch.bfloat16)
        given = {"query": heads, "key": heads, "value": heads, "attn_mask": torch.empty(256, 256) if masked else None}
        assert kernel_of(name, given) == kernel


def test_seconds_are_those_of_each_kernel() -> None:
    card = device_called("H100")
    attention = Work(flops=100, attention_flops=40, cudnn=30, flash_backward=10)
    expected = 60 / card.flops + 30 / card.attention["cudnn"] + 10 / card.attention["flash_backward"]
    assert card.seconds(attention) == pytest.approx(expected)
    other = device_called("L40S")
    assert other.seconds(attention) == pytest.approx(100 / other.flops)
    assert set(card.attention) == set(ATTENTION)


def test_hidden_pairs_are_taken_from_every_kernel() -> None:
    found = Work(flops=100, attention_flops=40, masked_flops=40, cudnn=30, flash=10).without_hidden(20)
    assert (found.flops, found.attention_flops, found.cudnn, found.flash) == (80, 20, 15, 5)
    assert summed([found, found]).cudnn == 30
