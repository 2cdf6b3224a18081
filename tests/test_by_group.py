"""Sums of outer products by group: added in place to groups that have rows, by a kernel if the device has one."""

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from streamfx.cost.meter import Meter
from streamfx.dialect.products import ADD_ARRANGED_OUTER, GROUPED_MM, GROUPED_OUTER
from streamfx.kernels import accumulate, grouped_mm
from streamfx.kernels.device_kinds import DeviceKind, pretend_device
from streamfx.kernels.grouped_mm import arrange
from streamfx.torch_private import FakeTensorMode
from tests.support.decoders.parts import VOCABULARY, made
from tests.support.exactness import compare
from tests.support.sorted_experts import SortedExperts, SparseDecoder, Spelling

HALF, LENGTH = torch.bfloat16, 21
A100, H100 = DeviceKind("cuda", (8, 0), True), DeviceKind("cuda", (9, 0), True)


class StandIns:
    """Replaces `triton_grouped_mm.py`: look rows up, end groups at the offsets of a tensor, and skip empty groups."""

    def __init__(self) -> None:
        self.called: Counter[str] = Counter()

    def add_outer(self, total: Tensor, x: Tensor, y: Tensor, order: Tensor, ends: Tensor) -> None:
        self.called["add_outer"] += 1
        assert total.shape == (len(ends), x.shape[1], y.shape[1]) and len(x) == len(y) == len(order) and x.dtype == y.dtype
        for own, rows in zip(total, self.groups(order, ends), strict=True):
            if len(rows):
                own += (x[rows].t() @ y[rows]).to(own.dtype)

    def multiply(self, x: Tensor, weight: Tensor, order: Tensor, ends: Tensor) -> Tensor:
        self.called["multiply"] += 1
        assert weight.shape[:2] == (len(ends), x.shape[1]) and len(x) == len(order) and x.dtype == weight.dtype
        out = x.new_zeros(len(order), weight.shape[2])
        for own, rows in zip(weight, self.groups(order, ends), strict=True):
            out[rows] = x[rows] @ own
        return out

    def groups(self, order: Tensor, ends: Tensor) -> list[Tensor]:
        assert order.dtype == torch.int64 and ends.dtype == torch.int32
        return [order[start:stop] for start, stop in pairwise([0, *ends.tolist()])]


@contextmanager
def by_stand_ins() -> Iterator[StandIns]:
    """A GPU on the CPU, with float64 for a half type."""
    stand_ins = StandIns()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped_mm, "HALF_DTYPES", (*grouped_mm.HALF_DTYPES, torch.float64))
        patch.setattr(grouped_mm, "device_kind", lambda _: A100)
        patch.setattr(grouped_mm, "_triton", lambda: stand_ins)
        yield stand_ins


class Spared(SortedExperts):
    """No row chooses the last expert, whose weights are not finite."""

    def __init__(self, spelling: Spelling) -> None:
        super().__init__(spelling)
        with torch.no_grad():
            self.up[3], self.down[3] = torch.nan, torch.inf

    def groups(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares, chosen = super().groups(x)
        return shares, chosen.clamp(max=2)


@pytest.mark.compiled
@pytest.mark.parametrize("by", [pytest.param(nullcontext, marks=pytest.mark.long), by_stand_ins], ids=["one by one", "by kernel"])
def test_gradients(by: Any) -> None:
    """Two sequences, in chunks of any size."""
    model = made(lambda: SparseDecoder(lambda: Spared(Spelling()), layers=1))
    ids, labels = torch.randint(0, VOCABULARY, (2, 2, LENGTH), generator=torch.Generator().manual_seed(3))
    with by() as stand_ins:
        compare(model, {"ids": ids, "labels": labels}, chunk_size=16, also=(1, 7, LENGTH), streams=True)
    assert by is nullcontext or min(stand_ins.called["add_outer"], stand_ins.called["multiply"]) >= LENGTH


# -- groups without rows

GROUPS = 6


def case(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of the groups 1 and 4, and one row of none."""
    return torch.randn(6, 5).to(dtype), torch.randn(6, 7).to(dtype), torch.tensor([4, 1, GROUPS, 4, 1, 4])


@pytest.mark.parametrize("total_type", [torch.float64, torch.float32])
def test_groups_without_rows_do_not_change(total_type: torch.dtype) -> None:
    """Not even zeros are added to them: one product for each group that has rows."""
    x, y, group = case(torch.float64 if total_type is torch.float64 else HALF)
    x[2] = y[2] = torch.nan  # the row of no group
    total = torch.full((GROUPS, 5, 7), torch.nan, dtype=total_type)
    total[[1, 4]] = 1
    order, ends = arrange(group, GROUPS)
    with mock.patch("streamfx.kernels.accumulate.add_product", wraps=accumulate.add_product) as product:
        grouped_mm.add_arranged_outer(total, x, y, order, ends)
    assert product.call_count == 2
    assert total[[0, 2, 3, 5]].isnan().all()
    for own in (1, 4):
        rows = group == own
        torch.testing.assert_close(total[own], 1 + x[rows].to(total_type).t() @ y[rows].to(total_type))


@pytest.mark.parametrize("by", [nullcontext, by_stand_ins], ids=["one by one", "by kernel"])
def test_no_rows_at_all(by: Any) -> None:
    x, y, group = (item[:0] for item in case())
    weight = torch.full((GROUPS, 5, 7), torch.nan, dtype=torch.float64)
    with by():
        assert GROUPED_MM(x, weight, group).shape == (0, 7)
        assert torch.equal(GROUPED_OUTER(x, y, group, GROUPS), torch.zeros_like(weight))


# -- a kernel that is wrong, or missing


@pytest.mark.parametrize(
    ("reason", "made"),
    [
        ("results differ", lambda: SimpleNamespace(add_outer_is_correct=lambda *_: False)),
        ("do not run", lambda: SimpleNamespace(add_outer_is_correct=lambda *_: 1 / 0)),
        ("(ImportError: ", ImportError("No module named 'triton'")),
    ],
)
def test_a_wrong_kernel_is_not_used(
    reason: str, made: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is tried once, with one warning; another kernel computes the sums."""
    module = mock.Mock(side_effect=made)
    grouped_mm._add_outer_is_correct.cache_clear()
    monkeypatch.setattr(grouped_mm, "device_kind", lambda _: A100)
    monkeypatch.setattr(grouped_mm, "_triton", module)
    monkeypatch.setattr(grouped_mm, "_is_simulated", lambda _: False)
    x, y, group = case(HALF)
    total = torch.zeros(GROUPS, 5, 7)
    with caplog.at_level(logging.WARNING, "streamfx"):
        for _ in range(2):
            grouped_mm.add_arranged_outer(total, x, y, *arrange(group, GROUPS))
    module.assert_called_once()
    (record,) = caplog.records
    assert reason in record.getMessage() and "run instead" in record.getMessage()
    torch.testing.assert_close(total[4], 2 * x[group == 4].float().t() @ y[group == 4].float())
    grouped_mm._add_outer_is_correct.cache_clear()


def test_types_and_devices_that_have_a_kernel() -> None:
    with FakeTensorMode():
        x, total = torch.zeros(4, 8, dtype=HALF), torch.zeros(3, 8, 8)
        assert not grouped_mm.adds_by_group(total, x, x)  # a CPU
        with pretend_device(DeviceKind("cuda", (7, 5))):
            assert not grouped_mm.adds_by_group(total, x, x)
        with pretend_device(A100):
            assert grouped_mm.adds_by_group(total, x, x) and grouped_mm.adds_by_group(total.to(HALF), x, x)
            assert grouped_mm.multiplies_by_group(x, total.to(HALF)) and not grouped_mm.multiplies_by_group(x, total)
            assert not grouped_mm.adds_by_group(total, x.float(), x.float())  # where TF32 would be less than eager's
            assert not grouped_mm.adds_by_group(total.double(), x, x) and not grouped_mm.adds_by_group(
                total, x, x.to(torch.float16)
            )


# -- costs

ROWS, HEIGHT, WIDTH, MANY = 64, 32, 48, 16


def metered(kind: DeviceKind, operator: Any, *operands: Tensor) -> Meter:
    order, ends = torch.zeros(len(operands[-2]), dtype=torch.int64), torch.zeros(MANY, dtype=torch.int32)
    with pretend_device(kind), Meter() as meter:
        operator(*operands, order, ends)
    return meter


@pytest.mark.parametrize("rows", [ROWS, 4])
def test_it_is_added_in_place(rows: int) -> None:
    """Without a gradient of all groups or sorted rows; only groups that rows can reach are read and written."""
    with FakeTensorMode():
        total = torch.zeros(MANY, HEIGHT, WIDTH)
        x, y = torch.zeros(rows, HEIGHT, dtype=HALF), torch.zeros(rows, WIDTH, dtype=HALF)
        meter = metered(A100, ADD_ARRANGED_OUTER, total, x, y)
    work, moved = meter.work, 2 * total.nbytes * min(rows, MANY) // MANY
    assert (meter.peak, work.flops, work.total_bytes) == (0, 2 * rows * HEIGHT * WIDTH, moved)
    assert work.product_bytes == moved + x.nbytes + y.nbytes + 8 * rows + 4 * MANY
