"""FLOPs of operators that PyTorch counts otherwise."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import flop_registry

from streamfx.cost.flops import flops_of

aten = torch.ops.aten


@pytest.mark.parametrize("groups", [1, 4, 8])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("asked", [(True, True, True), (True, False, False), (False, True, True)])
def test_each_gradient_of_a_convolution_takes_what_its_forward_half_takes(
    groups: int, transposed: bool, asked: tuple[bool, ...]
) -> None:
    x, weight = torch.randn(2, 8, 20), torch.randn(8, 8 // groups, 3)
    how = ((2,), (1,), (1,), transposed, (0,), groups)
    out = aten.convolution.default(x, weight, None, *how)
    forward = flops_of(aten.convolution.default, (x, weight, None, *how), {}, out)
    given = (out, x, weight, [8], *how, list(asked))
    found = flops_of(aten.convolution_backward.default, given, {}, aten.convolution_backward.default(*given))
    assert found == forward * sum(asked[:2])
    if groups == 1 and not transposed:
        assert found == flop_registry[aten.convolution_backward](*given, out_val=aten.convolution_backward.default(*given))
