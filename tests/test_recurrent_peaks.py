"""What a model with a state keeps for each further chunk: the state with which it began, and rows of the residual stream."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

import streamfx
from benchmarks.live_bytes import peak_live_bytes
from tests.support import layouts
from tests.support.recurrent import BATCH, WIDTH
from tests.support.spread import only
from tests.test_recurrent_families import OPERATORS_OF, VOCABULARY, WRITTEN, Decoder, of_transformers

pytestmark = pytest.mark.long

LAYERS, FEW, MANY = 2, 9, 15
NUMBER = torch.float32.itemsize
CHUNK, BLOCK = 4, 11


@dataclass(frozen=True)
class Bytes:
    predicted: int
    kept: int
    eager: int
    states: frozenset[int]  # of one layer
    measured: int = 0


def bytes_of(model: nn.Module, form: str, length: int, chunk: int, measures: bool = False) -> Bytes:
    batch = layouts.plain(layouts.tokens(VOCABULARY, BATCH, length, 0))
    options: dict[str, Any] = {"chunk_size": chunk, "loss_chunk_size": chunk, "bodies": "eager"}
    torch._dynamo.reset()
    explained = streamfx.explain(model, **batch, options=options)
    summary = explained.summary()
    nodes = [node for graph in explained.call.graphs for node in graph.facts.joint.forward]
    states = frozenset(node.target.carried for node in nodes if isinstance(node.target, OPERATORS_OF[form]))
    figures = Bytes(summary["peak_bytes"], summary["saved_bytes"], summary["baseline_peak_bytes"], states)
    if not measures:
        return figures
    compiled = torch.compile(model, backend="streambp", options=options)
    compiled(**batch).backward()
    model.zero_grad()
    return replace(figures, measured=peak_live_bytes(lambda: compiled(**batch).backward()))


def written(form: str, length: int, chunk: int = CHUNK, measures: bool = False, layers: int = LAYERS) -> Bytes:
    torch.manual_seed(0)
    return bytes_of(Decoder("mamba", WRITTEN[form], layers), form, length, chunk, measures)


def per_chunk(many: Bytes, few: Bytes, name: str) -> float:
    return (getattr(many, name) - getattr(few, name)) / (MANY - FEW)


@pytest.mark.parametrize("form", only(["operator"], WRITTEN))
def test_with_each_layer_the_peak_grows_by_one_state_per_chunk(form: str) -> None:
    """Beyond the rows of one residual stream, of which a longer sequence has more."""
    grown = []
    for layers in (LAYERS, LAYERS + 1):
        few, many = (written(form, count * CHUNK, measures=True, layers=layers) for count in (FEW, MANY))
        assert few.states == many.states
        grown.append({name: per_chunk(many, few, name) for name in ("predicted", "measured", "kept", "eager")})
    (state,), rows = many.states, BATCH * CHUNK * WIDTH * NUMBER
    more = {name: bytes_of_layer - grown[0][name] for name, bytes_of_layer in grown[1].items()}
    assert more.pop("eager") > 1.5 * (state + rows)
    assert all(state <= own <= state + rows for own in more.values()), (more, state, rows)


@pytest.mark.long
@pytest.mark.parametrize("form", WRITTEN)
def test_of_shorter_chunks_one_state_each_is_kept(form: str) -> None:
    longer, shorter = (written(form, 8 * CHUNK, rows) for rows in (2 * CHUNK, CHUNK))
    (state,) = shorter.states
    assert 0 < shorter.kept - longer.kept <= 4 * LAYERS * state


@pytest.mark.long
def test_with_each_layer_of_transformers_it_grows_by_one_state_and_one_stream() -> None:
    """What goes back through a convolution is given rows of one layer at a time, whichever it is."""
    grown = []
    for layers in (LAYERS, LAYERS + 1):
        torch.manual_seed(0)
        model = of_transformers("mamba2", layers, is_short=True)
        few, many = (bytes_of(model, "transformers", count * BLOCK, BLOCK) for count in (FEW, MANY))
        grown.append({name: per_chunk(many, few, name) for name in ("predicted", "kept")})
    (state,), rows = many.states, BATCH * BLOCK * WIDTH * torch.float64.itemsize
    for name, more in grown[1].items():
        assert state <= more - grown[0][name] <= state + rows, (name, grown, state, rows)
