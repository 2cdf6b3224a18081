"""A few chunks stand for all: what a call costs is found without running each of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from streamfx.cost.flops import visible_pairs
from streamfx.cost.sampling import stretches, total
from streamfx.ir.span import Span
from streamfx.runtime.chunks import Chunks
from tests.support.small import EXAMPLES, Causal
from tests.support.spread import only
from tests.test_explain import summary_of


@pytest.mark.parametrize("example", only(["streams"], EXAMPLES))
def test_sampled_chunks_stand_for_all(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures of a loop that runs few chunks are those of one that runs them all."""
    model, arguments = EXAMPLES[example].model(), EXAMPLES[example].arguments()
    sampled = summary_of(model, *arguments, options={"chunk_size": 1})
    monkeypatch.setattr("streamfx.cost.sampling.sample_of", list)
    monkeypatch.setattr("streamfx.cost.sampling.total", lambda stretch, costs: sum(costs[i] for i in stretch))
    every = summary_of(model, *arguments, options={"chunk_size": 1})
    assert (sampled["flops"], sampled["peak_bytes"]) == (every["flops"], every["peak_bytes"])


def test_stretches_end_where_sizes_begin_to_change() -> None:
    assert [len(part) for part in stretches(Chunks(20, 2), {7})] == [1, 2, 1, 5, 1]
    assert [len(part) for part in stretches(Chunks(19, 2, reverse=True), {8})] == [1, 4, 1, 1, 2, 1]
    assert total(range(2, 9), {2: 4, 5: 25, 8: 64}) == sum(i * i for i in range(2, 9))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [0, 1, 7, 8, 9])
def test_chunks_are_found_by_number(length: int, reverse: bool) -> None:
    plain = [(start, min(start + 4, length)) for start in range(0, length, 4)] or [(0, length)]
    chunks = Chunks(length, 4, reverse)
    assert list(chunks) == plain[:: -1 if reverse else 1]
    for row in range(-2, length + 3):
        assert chunks.touching(row) == {i for i, (start, stop) in enumerate(chunks) if start <= row <= stop}


def test_the_number_of_chunks_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten million rows in chunks of four: no chunk is looked at but those that run."""
    looked: list[int] = []
    get = Chunks.__getitem__
    monkeypatch.setattr(Chunks, "__getitem__", lambda chunks, number: looked.append(number) or get(chunks, number))
    ids: Any = torch.empty(1, 10**7, dtype=torch.int64, device="meta")
    assert summary_of(Causal().to("meta"), ids, ids, options={"chunk_size": 4})["sequence"] == [10**7]
    assert len(looked) < 1000


@pytest.mark.parametrize(("low", "high"), [(None, 0), (-2, 0), (-1, 1), (None, None), (None, 3), (-3, None)])
def test_visible_pairs(low: int | None, high: int | None) -> None:
    seen = sum((low is None or key >= row + low) and (high is None or key <= row + high) for row in range(5) for key in range(7))
    assert visible_pairs(5, 7, Span(low, high)) == seen
