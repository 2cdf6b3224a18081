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


def test_a_triangle_of_blocks() -> None:
    def function(inputs: Tensor) -> Tensor:
        q, k, v = (torch.tanh(part) for part in inputs.unbind())
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed[0, 0].unflatten(0, (-1, 3)).sum(1).tril().square().square().sum()

    compare_function(function, qkv(), (3, 6), tolerance=1e-12)


MASKS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "keys": lambda q, k, mask: F.scaled_dot_product_attention(q, twice(k), twice(k), mask.repeat_interleave(2, 1)),
    "queries": lambda q, k, mask: F.scaled_dot_product_attention(twice(q), k, k, mask.repeat_interleave(2, 0)),
    "both": lambda q, k, mask: F.scaled_dot_product_attention(
        twice(q), twice(k), twice(k), mask.repeat_interleave(2, 0).repeat_interleave(2, 1)
    ),
}


def twice(x: Tensor) -> Tensor:
    """[b h t d] to [b h (t 2) d]: two rows side by side."""
    return torch.stack((x, x / 2), 3).flatten(2, 3)


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_of_rows_side_by_side_is_kept(name: str) -> None:
    """It hides exactly what lies outside of the span, and yet no kernel may count keys instead."""

    def function(inputs: Tensor) -> Tensor:
        q, k, v = (torch.tanh(part) for part in inputs.unbind())
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return MASKS[name](mixed, k, torch.arange(T) <= torch.arange(T)[:, None]).square().sum()

    facts = compare_function(function, qkv(), (4, 1, 2), tolerance=1e-12)
    assert not facts.reasons()


SHIFTED: dict[str, Callable[[Tensor], Tensor]] = {
    "behind the end": lambda x: F.pad(x[:, :, 2:], (0, 0, 0, 2)),
    "behind the end, by one pad": lambda x: F.pad(x, (0, 0, -2, 2)),
    "before the start": lambda x: F.pad(x[:, :, :-2], (0, 0, 2, 0)),
    "further rows at the end": lambda x: torch.cat((x, x[:, :, -3:]), 2),
    "further rows in front": lambda x: torch.cat((x[:, :, :3], x), 2),
    "halves swapped": lambda x: torch.cat((x[:, :, T // 2 :], x[:, :, : T // 2]), 2),
}


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("name", SHIFTED)
def test_rows_outside_of_the_sequence_see_what_lies_there(name: str, window: int | None) -> None:
    def function(inputs: Tensor) -> Tensor:
        q, k, v = (torch.tanh(part) for part in inputs.unbind())
        x = SHIFTED[name](F.scaled_dot_product_attention(q, k, v, is_causal=True))
        delta = torch.arange(x.shape[2]) - torch.arange(x.shape[2])[:, None]
        seen = (delta <= 0) & (delta > -(window or x.shape[2]))
        return F.scaled_dot_product_attention(x, x.sin(), x, attn_mask=seen).square().sum()

    compare_function(function, qkv(), (4, 1, 2, 9), tolerance=1e-12)


CROPPED: dict[str, Callable[[Tensor], Tensor]] = {
    "in front": lambda x: x[:, :, 5:],
    "behind": lambda x: x[:, :, :-5],
    "both": lambda x: x[:, :, 2:-2],
}


@pytest.mark.parametrize("cropped", CROPPED)
@pytest.mark.parametrize("scan", [torch.cumsum, torch.cumprod, torch.logcumsumexp])
def test_a_scan_begins_where_its_rows_begin(scan: Callable[[Tensor, int], Tensor], cropped: str) -> None:
    """Zero, which a carry holds before its first row, is nothing to add, but not nothing to multiply by."""

    def function(inputs: Tensor) -> Tensor:
        q, k, v = (torch.tanh(part) for part in inputs.unbind())
        x = CROPPED[cropped](F.scaled_dot_product_attention(q, k, v, is_causal=True))
        forwards, backwards = scan(x + 2, 2), scan((x + 2).flip(2), 2).flip(2)
        return forwards.sin().sum() + backwards.cos().sum()

    compare_function(function, qkv(), (4, 1, 2, 9), tolerance=1e-12)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_goes_on_in_eagers_order(reverse: bool) -> None:
    """What is infinite within a chunk is nothing behind nothing, and finite behind what makes up for it."""

    def function(inputs: Tensor) -> Tensor:
        x = inputs[0].tanh()
        numbers = (
            (torch.arange(T) > 0).double() * 1e120,
            torch.tensor([-1.5e308, 1e308, 1e308], dtype=torch.float64).repeat(T)[:T],
        )
        of_rows = x.detach().square().sum((0, 1, 3)) * 0  # else they are made before the loops
        turned = [item.flip(0) + of_rows if reverse else item + of_rows for item in numbers]
        product, total = turned[0].cumprod(0), turned[1].cumsum(0) / 1e308
        scale = (product.flip(0), total.flip(0)) if reverse else (product, total)
        return sum(((x * item[:, None]).square().sum() for item in scale), x.new_zeros(()))

    compare_function(function, qkv(), (4, 1, 2, 9), tolerance=1e-12)


@pytest.mark.parametrize("missing", [1, 2, 5])
@pytest.mark.parametrize("side", ["keys", "queries"])
def test_queries_in_front_of_the_first_key(side: str, missing: int) -> None:
    """They see nothing."""

    def function(inputs: Tensor) -> Tensor:
        q, k, v = (torch.tanh(part) for part in inputs.unbind())
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if side == "keys":
            seen = torch.arange(missing, T) <= torch.arange(T)[:, None]
            mixed = F.scaled_dot_product_attention(x, k[:, :, missing:], v[:, :, missing:], attn_mask=seen)
        else:
            seen = torch.arange(T) <= torch.arange(-missing, T)[:, None]
            mixed = F.scaled_dot_product_attention(F.pad(x, (0, 0, missing, 0)), k, v, attn_mask=seen)
        return mixed.square().sum()

    compare_function(function, qkv(), (4, 1, 2, 9), tolerance=1e-12)


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
    assert "causal" in facts.causality.verdicts.values()
