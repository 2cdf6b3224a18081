"""Choices of a plan: values to save, and rows per chunk."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamfx.cost.memory import cost_of
from streamfx.ir.facts import Facts, known
from streamfx.ir.stage_plan import CHUNK_COUNT_RATIOS, MIN_ROWS, MIN_WORKING_SET, SINGLE_CHUNK_SHARE, TILE, WORK_SHARE, AutoChunk
from streamfx.options import resolve_options
from tests.support import hf
from tests.support.exactness import compare
from tests.support.hf import LossOf, deep

pytestmark = pytest.mark.compiled

LAYERS = 5
LEVELS = ("inputs", "attention", "projections", "products")


def loops_again(facts: Facts) -> int:
    return sum("_again" in loop.spec.name for loop in known(facts.program).loops)


def test_each_level_saves_more_and_recomputes_less() -> None:
    """Values of the first layer, batch 1: each level also saves the values of the level before it."""
    ids = torch.randint(1, hf.VOCABULARY, (1, 12))
    model = LossOf(deep(hf.qwen3, 2))
    (recorded,) = compare(model, {"input_ids": ids, "labels": ids}, chunk_size=6).recorder.compilations
    chunks = {"chunk_size": 6, "loss_chunk_size": 6}
    facts = [recorded.facts_for(resolve_options({"save": save, **chunks})) for save in LEVELS]
    kept = [{node.name: tuple(node.meta["val"].shape) for node in own.plan.kept[0]} for own in facts]
    assert all(less.items() < more.items() for less, more in pairwise(kept))
    shapes = [sorted(more[name] for name in more.keys() - less.keys()) for less, more in pairwise(kept)]
    keys, queries, inner = hf.KEY_HEADS * hf.HEAD, hf.HEADS * hf.HEAD, hf.ROTARY["intermediate_size"]
    assert shapes[0] == [(1, hf.HEADS, 12), (1, hf.HEADS, 12, hf.HEAD)]
    assert shapes[1] == sorted([(12, keys), (12, keys), (12, queries), (1, 12, hf.WIDTH)])
    assert shapes[2] == [(12, inner), (12, inner)]
    costs = [cost_of(own.program.forward, own.program.backward, 1) for own in facts if own.program is not None]
    assert all(less.flops > more.flops and less.held < more.held for less, more in pairwise(costs))
    every = [recorded.facts_for(resolve_options({"keep_every": number, **chunks})) for number in (1, 2, 9)]
    assert [loops_again(own) for own in every] == [0, 1, 1]
    assert [len(known(every[0].program).saved) - len(known(own.program).saved) for own in every] == [0, 1, 1]


@given(
    length=st.integers(1, 1 << 20),
    row_bytes=st.integers(1, 1 << 22),
    stream_bytes=st.integers(1, 1 << 16),
    worthwhile=st.integers(0, 1 << 16),
    held=st.integers(0, 100 << 30),
    cuts=st.integers(0, 100),
)
def test_a_chunk_takes_a_bounded_share_of_memory(
    length: int, row_bytes: int, stream_bytes: int, worthwhile: int, held: int, cuts: int
) -> None:
    """The share is of the live bytes, or one value at a cut; rows are rounded to tiles."""
    chunk = AutoChunk(row_bytes, stream_bytes, worthwhile, held, cuts)
    rows, small = (item.rows(length, row_bytes, stream_bytes) for item in (chunk, AutoChunk(row_bytes, stream_bytes)))
    assert small <= rows <= length
    least = max(MIN_WORKING_SET, length * stream_bytes, MIN_ROWS * row_bytes)
    share = (held + cuts * length * stream_bytes) // (SINGLE_CHUNK_SHARE if rows == length else WORK_SHARE)
    assert rows * row_bytes <= max(least, min(worthwhile * row_bytes, share)) / CHUNK_COUNT_RATIOS[0] + TILE * row_bytes
