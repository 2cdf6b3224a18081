"""Rows per chunk: as few as memory is worth, as many as time is worth."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamfx.cost.flops import flops_of_call
from streamfx.cost.rates import CPU, CUDA, rates_of
from streamfx.ir.facts import Facts, StorageClass
from streamfx.ir.stage import Stage
from streamfx.ir.stage_plan import LEAST_ROWS, LEAST_WORKING_SET, NEAR, SHARE, SINGLE, TILE, AutoChunk
from streamfx.options import resolved
from streamfx.passes.ops.traits import is_expensive
from streamfx.passes.partition.chunk_sizes import OVERHEAD, chunk_sizes, worthwhile_rows
from tests.support import hf
from tests.support.exactness import compare
from tests.support.hf import deep

GIB = 1 << 30
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
    return next(stage for stage in facts.stages if any(node in facts.causality.spans for node in stage.forward))


@given(
    length=st.integers(1, 1 << 20),
    row_bytes=st.integers(1, 1 << 22),
    stream_bytes=st.integers(1, 1 << 16),
    worthwhile=st.integers(0, 1 << 16),
    held=st.integers(0, 100 * GIB),
    cuts=st.integers(0, 100),
)
def test_work_takes_a_stated_share(length: int, row_bytes: int, stream_bytes: int, worthwhile: int, held: int, cuts: int) -> None:
    """Of what a step holds, or as much as one value at a cut; and no more rows than are worth their memory, or so many that
    chunks
    are equal, or whole tiles."""
    chunk = AutoChunk(row_bytes, stream_bytes, worthwhile, held, cuts)
    rows, small = (item.rows(length, row_bytes, stream_bytes) for item in (chunk, AutoChunk(row_bytes, stream_bytes)))
    assert small <= rows <= length
    least = max(LEAST_WORKING_SET, length * stream_bytes, LEAST_ROWS * row_bytes)
    share = (held + cuts * length * stream_bytes) // (SINGLE if rows == length else SHARE)
    assert rows * row_bytes <= max(least, min(worthwhile * row_bytes, share)) / NEAR[0] + TILE * row_bytes


def test_rows_of_a_large_model() -> None:
    """Qwen3-8B at 8,192 tokens, as traced for an H100: chunks of 144 rows would move totals 57 times."""
    layers = AutoChunk(row_bytes=476936, stream_bytes=8192, worthwhile=8192, held=32763007236, cuts=37)
    head = AutoChunk(row_bytes=1089374, stream_bytes=8192, worthwhile=5593, held=32763007236, cuts=37, enough=2048)
    assert layers.rows(8192, 476936, 8192) == 8192  # one chunk, whose sums need no totals
    assert layers.rows(16384, 476936, 8192) == 4096
    assert head.rows(8192, 1089374, 8192) == 2048
    spelled_out = AutoChunk(row_bytes=100 << 20, stream_bytes=8192, worthwhile=8192, enough=2048)  # scores of all keys in a row
    assert spelled_out.rows(8192, 100 << 20, 8192) == 64  # and not 2,048
    assert AutoChunk(476936, 8192).rows(8192, 476936, 8192) == 128


@given(length=st.integers(1, 1 << 20), most=st.integers(8, 1 << 14), granule=st.sampled_from([1, 64, 96]))
def test_a_limit_is_kept(length: int, most: int, granule: int) -> None:
    """A working set that was simulated is exceeded by rounding alone, of few rows."""
    rows = AutoChunk(1, 1, working_set=most, granule=granule).rows(length, 1, 1)
    assert rows <= max(most, granule) + max(8, granule)


@pytest.mark.parametrize("tiles", [64, 256, 1000, 1024, 24 * 7])
@pytest.mark.parametrize("most", [1000, 2048, 5464, 9000])
def test_chunks_are_equal_and_whole_tiles(tiles: int, most: int) -> None:
    """If a length has chunks of whole tiles about as long as wished; the number of chunks stays near the wish."""
    length, wished = tiles * TILE, -(-tiles * TILE // most)
    rows = AutoChunk(1, 1, working_set=most).rows(length, 1, 1)
    assert rows % TILE == 0 and rows <= most and -(-length // rows) <= NEAR[1] * wished
    divides = any(tiles % n == 0 for n in range(wished, int(NEAR[1] * wished) + 1))
    assert length % rows == 0 or not divides


def test_totals_are_worth_rows(trained: Facts) -> None:
    """At that many rows, totals are read and written in a small share of the time of products."""
    stage = layer(trained)
    totals = [node for node in stage.backward if trained.demand.forms.get(node, (None,))[0] is StorageClass.SUM]
    moved = sum(8 * node.meta["val"].numel() for node in totals)
    nodes = (*stage.forward, *stage.forward, *stage.backward)
    flops = sum(flops_of_call(node.target, node.args, node.kwargs, node) for node in nodes if is_expensive(node))
    for rates in (CPU, CUDA):
        rows = worthwhile_rows(stage, trained, rates)
        assert 0 < rates.seconds(moved=moved) <= OVERHEAD * rates.seconds(flops=flops) * rows / LENGTH


def test_frozen_weights_have_no_totals(trained: Facts) -> None:
    frozen = facts_of("mlp", "self_attn")
    for rates in (replace(CPU, launch=0), replace(CUDA, launch=0)):  # which are most of what so small a layer costs
        assert worthwhile_rows(layer(frozen), frozen, rates) < worthwhile_rows(layer(trained), trained, rates)


def test_faster_devices_want_more_rows(trained: Facts) -> None:
    assert worthwhile_rows(layer(trained), trained, CPU) < worthwhile_rows(layer(trained), trained, CUDA)


def test_a_gpu_is_kept_busy(trained: Facts, monkeypatch: pytest.MonkeyPatch) -> None:
    """With so many tokens at least, of which a row has one in each sequence; fewer where they are not worth it."""
    assert enough(trained) == rates_of(torch.device("cpu")).tokens // 2
    for tokens, wanted in ((600, 300), (10**10, worthwhile_rows(layer(trained), trained, CUDA))):
        rates = replace(CUDA, tokens=tokens)
        monkeypatch.setattr("streamfx.passes.partition.chunk_sizes.rates_of", lambda device, rates=rates: rates)
        assert enough(trained) == wanted


def enough(facts: Facts) -> int:
    size = chunk_sizes(facts, resolved({}))[facts.stages.index(layer(facts))]
    assert isinstance(size, AutoChunk)
    return size.enough


def test_what_is_asked_for_is_obeyed(trained: Facts) -> None:
    options = resolved({"chunk_size": 7, "loss_chunk_size": 5})
    assert set(chunk_sizes(trained, options)) == {7, 5}
