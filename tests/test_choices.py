"""Choices of a plan: values to save, rows per chunk, and placement of values in loops."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import streamfx
from streamfx.cost.flops import flops_of_call
from streamfx.cost.memory import cost_of
from streamfx.cost.rates import CPU, CUDA
from streamfx.ir.facts import Facts, StorageClass, known
from streamfx.ir.stage import Stage
from streamfx.ir.stage_plan import CHUNK_COUNT_RATIOS, MIN_ROWS, MIN_WORKING_SET, SINGLE_CHUNK_SHARE, TILE, WORK_SHARE, AutoChunk
from streamfx.options import resolve_options
from streamfx.passes.ops.traits import is_expensive
from streamfx.passes.partition import loop_distribution
from streamfx.passes.partition.chunk_sizes import MAX_OVERHEAD, worthwhile_rows
from tests.support import hf
from tests.support.exactness import compare
from tests.support.hf import LossOf, deep
from tests.support.stages import Layers, batch

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


LENGTH = 40


def facts_of(*frozen: str) -> Facts:
    """A small model, of which the named parameters are frozen."""
    model = deep(hf.llama, 2)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    ids = torch.randint(1, hf.VOCABULARY, (2, LENGTH))
    return compare(model, {"input_ids": ids, "labels": ids}).facts[0]


@pytest.fixture(scope="module")
def trained() -> Facts:
    return facts_of()


def layer(facts: Facts) -> Stage:
    return next(stage for stage in facts.stages if any(node in facts.key_spans.spans for node in stage.forward))


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


def test_chunks_amortize_the_traffic_of_sums(trained: Facts) -> None:
    """Totals take a small share of the time of products; frozen weights have none, and a faster device wants more rows."""
    stage, frozen = layer(trained), facts_of("mlp", "self_attn")
    totals = [node for node in stage.backward if trained.access.storage_classes.get(node, (None,))[0] is StorageClass.SUM]
    moved = sum(8 * node.meta["val"].numel() for node in totals)
    nodes = (*stage.forward, *stage.forward, *stage.backward)
    flops = sum(flops_of_call(node.target, node.args, node.kwargs, node) for node in nodes if is_expensive(node))
    for rates in (CPU, CUDA):
        rows = worthwhile_rows(stage, trained, rates)
        assert 0 < rates.seconds(moved=moved) <= MAX_OVERHEAD * rates.seconds(flops=flops) * rows / LENGTH
        idle = replace(rates, launch=0)  # which dominates for so small a layer
        assert worthwhile_rows(layer(frozen), frozen, idle) < worthwhile_rows(stage, trained, idle)
    assert worthwhile_rows(stage, trained, CPU) < worthwhile_rows(stage, trained, CUDA)


FOUND_ONCE = [
    getattr(loop_distribution, name) for name in ("earliest_loops", "latest_loops", "choose_stored_values", "cheapest_placement")
]


def placed(layers: int) -> tuple[int, list[int]]:
    """The number of regions in the plan of a decoder, and of how many different ones each step of the search was run."""
    for function in FOUND_ONCE:
        function.cache_clear()
    streamfx.explain(Layers(layers), *batch(length=64), chunk_size=16).summary(with_baseline=False)
    asked = loop_distribution.earliest_loops.cache_info()
    return asked.hits + asked.misses, [function.cache_info().misses for function in FOUND_ONCE]


def test_values_of_equal_layers_are_placed_once() -> None:
    few, more = placed(3), placed(5)
    assert more[0] >= few[0] + 4, "each layer has a forward and a backward half"
    assert more[1] == few[1], "more layers of the same kind are no more work"
