"""Sums of outer products by group: added in place, to groups that have rows, by whatever the device has for it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from streamfx.cost.meter import Meter
from streamfx.kernels import grouped_mm
from streamfx.kernels.device_kinds import DeviceKind, supposed
from streamfx.kernels.grouped_mm import ADD_ARRANGED_OUTER, ARRANGED_MM, GROUPED_MM, GROUPED_OUTER, arrange
from streamfx.torch_private import FakeTensorMode, TorchDispatchMode
from tests.support.by_group import A100, H100, in_their_place
from tests.support.decoders.parts import VOCABULARY, made
from tests.support.exactness import compare
from tests.support.sorted_experts import SortedExperts, SparseDecoder, Spelling

HALF = torch.bfloat16
LENGTH = 21


class Spared(SortedExperts):
    """Nobody chooses the last expert, whose weights are no numbers."""

    def __init__(self, spelling: Spelling) -> None:
        super().__init__(spelling)
        with torch.no_grad():
            self.up[3], self.down[3] = torch.nan, torch.inf

    def groups(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares, chosen = super().groups(x)
        return shares, chosen.clamp(max=2)


class Favoured(SortedExperts):
    """All rows go to one expert."""

    def groups(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares, chosen = super().groups(x)
        return shares, chosen.clamp(1, 1)


@pytest.mark.parametrize("kind", [SortedExperts, Spared, Favoured])
@pytest.mark.parametrize("by_kernel", [False, True], ids=["one by one", "by kernel"])
def test_gradients(kind: type[SortedExperts], by_kernel: bool) -> None:
    """Two sequences, in chunks of any size."""
    model = made(lambda: SparseDecoder(lambda: kind(Spelling()), layers=1))
    ids, labels = torch.randint(0, VOCABULARY, (2, 2, LENGTH), generator=torch.Generator().manual_seed(3))

    def check() -> None:
        compare(model, {"ids": ids, "labels": labels}, chunk_size=16, also=(1, 7, LENGTH), streams=True)

    if not by_kernel:
        check()
        return
    with in_their_place() as stand_ins:
        check()
    assert all(stand_ins.called[name] >= LENGTH for name in ("add_outer", "multiply"))


# -- groups without rows

GROUPS, SIZES = 6, (0, 2, 0, 0, 3, 0)


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        self.count[func] += 1
        return func(*args, **(kwargs or {}))


def case(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    group = torch.tensor([4, 1, GROUPS, 4, 1, 4])
    assert torch.equal(torch.bincount(group, minlength=GROUPS)[:GROUPS], torch.tensor(SIZES))
    x, y = torch.randn(6, 5), torch.randn(6, 7)
    return x.to(dtype), y.to(dtype), group


@pytest.mark.parametrize("total_type", [torch.float64, torch.float32])
def test_groups_without_rows_are_left_alone(total_type: torch.dtype) -> None:
    """Not even zeros are added to them, which would make numbers of nothing else: one product for each group that has rows."""
    x, y, group = case(torch.float64 if total_type is torch.float64 else HALF)
    x[2] = y[2] = torch.nan  # the row of no group
    total = torch.full((GROUPS, 5, 7), torch.nan, dtype=total_type)
    total[[1, 4]] = 1
    order, ends = arrange(group, GROUPS)
    with Calls() as calls:
        grouped_mm.add_arranged_outer(total, x, y, order, ends)
    assert calls.count[torch.ops.aten.addmm.out] == 2 and not calls.count[torch.ops.aten.add_.Tensor]
    assert total[[0, 2, 3, 5]].isnan().all()
    for own in (1, 4):
        rows = group == own
        torch.testing.assert_close(total[own], 1 + x[rows].to(total_type).t() @ y[rows].to(total_type))


@pytest.mark.parametrize("by_kernel", [False, True], ids=["one by one", "by kernel"])
def test_no_rows_at_all(by_kernel: bool) -> None:
    x, y, group = (item[:0] for item in case())
    weight = torch.full((GROUPS, 5, 7), torch.nan, dtype=torch.float64)

    def check() -> None:
        assert GROUPED_MM(x, weight, group).shape == (0, 7)
        assert torch.equal(GROUPED_OUTER(x, y, group, GROUPS), torch.zeros_like(weight))

    if by_kernel:
        with in_their_place():
            check()
    else:
        check()


# -- a kernel that is wrong, or missing


def missing() -> Any:
    raise ImportError("No module named 'triton'")


TRIED = {
    "other numbers": lambda: SimpleNamespace(adds_right=lambda *_: False),
    "do not run": lambda: SimpleNamespace(adds_right=lambda *_: 1 / 0),
    "(ImportError: ": missing,
}


@pytest.mark.parametrize("reason", TRIED)
def test_a_kernel_that_is_not_right_is_not_used(
    reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is tried once, and told; the sums are made in another way."""
    tried: list[None] = []

    def module() -> Any:
        tried.append(None)
        return TRIED[reason]()

    grouped_mm._adds_right.cache_clear()
    monkeypatch.setattr(grouped_mm, "kind_of", lambda _: A100)
    monkeypatch.setattr(grouped_mm, "_triton", module)
    monkeypatch.setattr(grouped_mm, "_is_planned", lambda _: False)
    x, y, group = case(HALF)
    total = torch.zeros(GROUPS, 5, 7)
    with caplog.at_level(logging.WARNING, "streamfx"):
        for _ in range(2):
            grouped_mm.add_arranged_outer(total, x, y, *arrange(group, GROUPS))
    assert len(tried) == 1
    (record,) = caplog.records
    assert reason in record.getMessage() and "take their place" in record.getMessage()
    torch.testing.assert_close(total[4], 2 * x[group == 4].float().t() @ y[group == 4].float())
    grouped_mm._adds_right.cache_clear()


def test_types_and_devices_that_have_a_kernel() -> None:
    with FakeTensorMode():
        x, total = torch.zeros(4, 8, dtype=HALF), torch.zeros(3, 8, 8)
        assert not grouped_mm.adds_by_group(total, x, x)  # a CPU
        with supposed(DeviceKind("cuda", (7, 5))):
            assert not grouped_mm.adds_by_group(total, x, x)
        with supposed(A100):
            assert grouped_mm.adds_by_group(total, x, x) and grouped_mm.adds_by_group(total.to(HALF), x, x)
            assert grouped_mm.multiplies_by_group(x, total.to(HALF)) and not grouped_mm.multiplies_by_group(x, total)
            assert not grouped_mm.adds_by_group(total, x.float(), x.float())  # where TF32 would be less than eager's
            assert not grouped_mm.adds_by_group(total.double(), x, x) and not grouped_mm.adds_by_group(
                total, x, x.to(torch.float16)
            )


# -- what it costs

ROWS, HEIGHT, WIDTH, MANY = 64, 32, 48, 16


@pytest.mark.parametrize("kind", [A100, H100])
@pytest.mark.parametrize("rows", [ROWS, 4])
def test_it_is_added_in_place(kind: DeviceKind, rows: int) -> None:
    """No gradient of all groups, no sorted rows; of the total what rows can reach is read and written."""
    with FakeTensorMode(), supposed(kind):
        total = torch.zeros(MANY, HEIGHT, WIDTH)
        x, y = torch.zeros(rows, HEIGHT, dtype=HALF), torch.zeros(rows, WIDTH, dtype=HALF)
        order, ends = torch.zeros(rows, dtype=torch.int64), torch.zeros(MANY, dtype=torch.int32)
        with Meter() as meter:
            ADD_ARRANGED_OUTER(total, x, y, order, ends)
    work, moved = meter.work, 2 * total.nbytes * min(rows, MANY) // MANY
    assert (meter.peak, work.flops, work.total_bytes) == (0, 2 * rows * HEIGHT * WIDTH, moved)
    assert work.product_bytes == moved + sum(item.nbytes for item in (x, y, order, ends))


def test_products_of_a_device_without_pytorchs_own() -> None:
    with FakeTensorMode():
        x, weight = torch.zeros(ROWS, HEIGHT, dtype=HALF), torch.zeros(MANY, HEIGHT, WIDTH, dtype=HALF)
        order, ends = torch.zeros(ROWS, dtype=torch.int64), torch.zeros(MANY, dtype=torch.int32)
        peaks = []
        for kind in (A100, H100):
            with supposed(kind), Meter() as meter:
                ARRANGED_MM(x, weight, order, ends)
            peaks.append(meter.peak)
    made = ROWS * WIDTH * 2
    assert peaks == [made, made + x.nbytes + made]
