"""Operators that count rows: the number of a row is its place in the sequence only where a dimension is nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.masks import HEAD, LENGTH, qkv
from tests.support.tracing import compare_function

B, H, T, D = 2, 2, LENGTH, HEAD
Merge = Callable[[Tensor], Tensor]
Counts = Callable[[Tensor], Tensor]

# of [b h t d] to [.. d]
MERGED: dict[str, Merge] = {
    "sequences": lambda x: x[:, 0].flatten(0, 1),
    "heads": lambda x: x[0].flatten(0, 1),
    "time first": lambda x: x[:, 0].transpose(0, 1).flatten(0, 1),
    "heads of a row": lambda x: x[0].transpose(0, 1).flatten(0, 1),
}
COUNTS: dict[str, Counts] = {
    "triangle": lambda x: x.triu(-T),
    "causal flag": lambda x: F.scaled_dot_product_attention(*(x[None, None],) * 3, is_causal=True),
    "triangle of scores": lambda x: (x @ x.T).tril() @ x,
}


@pytest.mark.parametrize("merged", MERGED)
@pytest.mark.parametrize("counts", COUNTS)
def test_the_sequence_is_a_part_of_the_number(merged: str, counts: str) -> None:
    def function(inputs: Tensor) -> Tensor:
        q, k, v = (torch.tanh(part) for part in inputs.unbind())
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return COUNTS[counts](MERGED[merged](mixed)).square().square().sum()

    facts = compare_function(function, qkv(), (4, 1, 2), tolerance=1e-12)
    assert any("counts rows along a dimension" in reason for reason in facts.reasons())


@pytest.mark.parametrize("counts", ["causal flag", "triangle of scores"])
def test_rows_in_another_order(counts: str) -> None:
    """An order that is undone in the end matters to what counts rows in between."""

    def function(inputs: Tensor) -> Tensor:
        q, k, v = (torch.tanh(part) for part in inputs.unbind())
        rows = F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0].flatten(0, 1)
        order = rows[:, 0].argsort(stable=True)
        mixed = COUNTS[counts](rows[order]).view_as(rows)[order.argsort()]
        return (mixed * torch.arange(len(rows))[:, None]).square().sum()

    compare_function(function, qkv(), (4, 1, 2), tolerance=1e-12)


def test_places_in_the_sequence_are_counted_in_chunks() -> None:
    def function(inputs: Tensor) -> Tensor:
        q, k, v = (torch.tanh(part) for part in inputs.unbind())
        return ((q @ k.transpose(-2, -1)).tril() @ v).square().sum()

    facts = compare_function(function, qkv(), (4, 1, 2), tolerance=1e-12, streams=True)
    assert facts.causality is not None
    assert "causal" in facts.causality.verdicts.values()
