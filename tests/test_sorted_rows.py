"""Rows that are sorted, worked on beside their new neighbours, and put back: a chunk puts its own rows where they stood."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from streamfx.ir.facts import StorageClass
from tests.support.exactness import compare

aten = torch.ops.aten


def by_scattering(order: Tensor) -> Tensor:
    return torch.zeros_like(order).scatter(1, order, torch.arange(order.shape[1]).expand_as(order))


def by_sorting(order: Tensor) -> Tensor:
    return order.argsort(1)


class Hashed(torch.nn.Module):
    """Attention among neighbours in the order of a hash, as Reformer's, given a hash of each row."""

    def __init__(self, undo: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.undo = undo
        self.out = torch.nn.Linear(6, 6)

    def forward(self, x: Tensor, hashes: Tensor) -> Tensor:
        order = hashes.argsort(1)
        rows = x.gather(1, order[..., None].expand_as(x)).unflatten(1, (-1, 4))
        mixed = (rows @ rows.mT).softmax(-1) @ rows
        made = self.out(mixed.flatten(1, 2))
        return made.gather(1, self.undo(order)[..., None].expand_as(made)) * 2


@pytest.mark.parametrize("undo", [by_scattering, by_sorting])
def test_rows_are_put_back_by_chunks(undo: Callable[[Tensor], Tensor]) -> None:
    inputs = {"x": torch.randn(2, 24, 6, dtype=torch.float64).requires_grad_(), "hashes": torch.randint(0, 5, (2, 24))}
    report = compare(Hashed(undo).double(), inputs, also=(1, 7, 64))
    (facts,) = report.facts
    (put,) = [node for node in facts.joint.nodes if node.target is aten.scatter.src and node in facts.joint.forward]
    assert facts.demand.form(put) is StorageClass.SUM


@pytest.mark.parametrize("value", [0.0, -0.0, float("inf")])
def test_what_is_put_back_is_what_it_was(value: float) -> None:
    """The signs of zeros, too: rows are written into their places, and not added to zeros."""

    def signs(x: Tensor, hashes: Tensor) -> Tensor:
        order = hashes.argsort(1)
        rows = x.gather(1, order[..., None].expand_as(x)).cumsum(1) * value
        return torch.copysign(torch.ones_like(x), rows.gather(1, by_scattering(order)[..., None].expand_as(x)))

    x, hashes = torch.randn(2, 24, 6), torch.randint(0, 5, (2, 24))
    with torch.no_grad():
        compiled = torch.compile(signs, backend="streambp", options={"chunk_size": 5})
        torch.testing.assert_close(compiled(x, hashes), signs(x, hashes), rtol=0, atol=0)


class Written(torch.nn.Module):
    """Some rows are written over others, by number."""

    def forward(self, x: Tensor, hashes: Tensor) -> Tensor:
        order = hashes.argsort(1)[:, :12, None].expand(-1, -1, x.shape[-1])
        return torch.ones_like(x).scatter(1, order, x[:, :12].sin()) * x


def test_rows_written_over_others() -> None:
    """What is not written stays: no sum over rows."""
    inputs = {"x": torch.randn(2, 24, 6, dtype=torch.float64).requires_grad_(), "hashes": torch.randint(0, 5, (2, 24))}
    compare(Written(), inputs, also=(1, 7, 64), streams=None)
