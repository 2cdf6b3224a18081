"""A tensor that holds what it held is told from one that does not, whatever wrote into it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from streamfx.ir.fingerprint import Fingerprint

TYPES = [torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.mT,
    "odd part": lambda tensor: tensor[..., 1:],
    "expanded": lambda tensor: tensor.expand(3, *tensor.shape),
    "nothing": lambda tensor: tensor[..., :0],
}
REARRANGED: dict[str, Callable[[Tensor], Tensor]] = {
    "negated": torch.neg,
    "rows reversed": lambda weight: weight.flip(0),
    "columns reversed": lambda weight: weight.flip(1),
    "pairs of rows swapped": lambda weight: weight.unflatten(0, (-1, 2)).flip(1).flatten(0, 1),
    "every second column negated": lambda weight: weight * torch.tensor([1, -1]).repeat(weight.shape[1] // 2),
    "one element, by its last bit": lambda weight: weight.index_put(
        (torch.tensor(300), torch.tensor(7)), weight[300, 7] * (1 + 2**-7)
    ),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_any_element_of_any_layout_is_seen(dtype: torch.dtype, view: str) -> None:
    for shape in ((1, 1), (3, 5), (7, 1030), (140, 130)):
        tensor = VIEWS[view](torch.ones(shape, dtype=dtype))
        seen = Fingerprint.of(tensor)
        assert seen.change(tensor) is None
        for place in {0, tensor.numel() // 2, tensor.numel() - 1} if tensor.numel() else ():
            index = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), tensor.shape))
            tensor.data[index] = 0
            assert "past its version counter" in str(seen.change(tensor))
            tensor.data[index] = 1
        assert seen.change(tensor) is None


@pytest.mark.parametrize("name", REARRANGED)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_contents_that_are_alike_are_told_apart(name: str, dtype: torch.dtype) -> None:
    """The same numbers in another order, or with other signs: sums that wrap would often be the same."""
    weight = torch.randn(512, 256, dtype=dtype)
    seen = Fingerprint.of(weight)
    weight.data.copy_(REARRANGED[name](weight))
    assert seen.change(weight) is not None


def test_pairs_of_signs_are_told_apart() -> None:
    """In sums that wrap at 32 bits every second one would not be."""
    weight = torch.randn(8, 64)
    seen = Fingerprint.of(weight)
    for place in range(0, 64, 2):
        pair = weight.data[0, place : place + 2]
        pair.neg_()
        assert seen.change(weight) is not None
        pair.neg_()
