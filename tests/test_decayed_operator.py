"""The operators that sum rows that decay are products with a matrix of weights, and so are their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from streamfx.runtime.segment_sum import DECAYED_SUMS, SUMS_BEHIND
from tests.test_decayed_sums import segment_sums


def test_it_repeats_nothing() -> None:
    with pytest.raises(ValueError, match="do not fit together"):
        DECAYED_SUMS(torch.zeros(1, 3), torch.zeros(2, 3, 4), None)


def test_its_products_are_counted() -> None:
    decays, rows = (torch.zeros(shape, requires_grad=True) for shape in ((2, 3, 5), (2, 3, 5, 4)))
    with FlopCounterMode(display=False) as counter:
        DECAYED_SUMS(decays, rows, None)[0].sum().backward()
    assert counter.get_total_flops() == 3 * 2 * (2 * 3) * 5 * 5 * 4


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("operator", [DECAYED_SUMS, SUMS_BEHIND])
def test_the_operator_is_the_product(count: int, is_first: bool, operator: Any) -> None:
    generator = torch.Generator().manual_seed(count)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()

    decays, rows, first = draw(2, 3, count), draw(2, 3, count, 4), draw(2, 3, 4) if is_first else None
    inputs = [decays, rows, *([first] if first is not None else [])]
    front = torch.zeros_like(rows[..., :1, :]) if first is None else first.unsqueeze(-2)
    made = segment_sums(F.pad(decays, (1, 0))).exp() @ torch.cat([front, rows], -2)
    sums = made[..., :-1, :] if operator is DECAYED_SUMS else made[..., 1:, :]
    truth, own = (sums, made[..., -1, :]), operator(decays, rows, first)
    torch.testing.assert_close(own, truth, rtol=1e-13, atol=1e-13)
    for used in (slice(0, 1), slice(1, 2), slice(0, 2)):
        weighted = [[(part * part.detach().cos()).sum() for part in parts[used]] for parts in (own, truth)]
        one, other = (torch.autograd.grad(parts, inputs, retain_graph=True, materialize_grads=True) for parts in weighted)
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
