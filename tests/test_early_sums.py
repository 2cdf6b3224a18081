"""Rows that the backward half takes whole, and that are known before any gradient, are made by the forward loops on the way."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

import streamfx
from tests.support import decoders, layouts
from tests.support.exactness import compare
from tests.support.recurrent import BATCH
from tests.support.spread import only
from tests.test_recurrent_families import TOLERANCE, VOCABULARY, of_transformers

LAYERS, BLOCK = 2, 11


def xlstm(blocks: int) -> tuple[nn.Module, dict[str, Tensor]]:
    ids = layouts.tokens(VOCABULARY, BATCH, blocks * BLOCK, 0)
    return decoders.made(lambda: of_transformers("xlstm", LAYERS, is_short=True)), {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("blocks", only([4], [3, 4, 5]))
def test_states_of_blocks_go_back_in_one_loop(blocks: int) -> None:
    """The last step with a gradient reads one row of each of its values: no loop makes these again for it. Nor is the last
    product of a layer made again: FLOPs are at most those of checkpointing.
    """
    model, batch = xlstm(blocks)
    compare(model, batch, chunk_size=BLOCK, also=(1, 2 * BLOCK), tolerance=TOLERANCE)
    found = streamfx.explain(model, **batch, chunk_size=BLOCK, loss_chunk_size=BLOCK).summary()
    assert [stage["loops"] for stage in found["stages"]] == [2] * LAYERS + [1]
    assert found["flops"] <= found["checkpointing_flops"]
