"""Values between the loops of a stage are recomputed in backward: exact, with little memory, and in one order on all ranks."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import streamfx
from streamfx.passes.lowering.collective_order import describe_order_between_loops
from streamfx.passes.ops.collectives import find_group_names
from tests.support.collectives import data_of
from tests.support.over_ranks import facts_of, one_of_many
from tests.support.sharded import Decoder, Layer
from tests.support.small import tokens
from tests.test_sequence_parallel import Gathered, Ulysses

pytestmark = pytest.mark.compiled

LAYERS, WIDTH, ROWS, VOCABULARY = 4, 16, 256, 11


class Mixing(nn.Module):
    """Layers that mix rows by a function that no loop can run, and a residual stream that runs in loops."""

    def __init__(self, mix: Callable[..., Tensor], layers: int = LAYERS) -> None:
        super().__init__()
        self.mix, self.embed, self.head = mix, nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.before, self.after = (
            nn.ModuleList(nn.Linear(*size) for _ in range(layers)) for size in ((WIDTH, 3 * WIDTH), (WIDTH, WIDTH))
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for before, after in zip(self.before, self.after, strict=True):
            x = x + after(self.mix(*F.gelu(before(x)).chunk(3, -1)))
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def to_keys(keys: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """Attention to keys that something is done to, number by number."""
    return lambda q, k, v: F.scaled_dot_product_attention(q[:, None], keys(k[:, None].sort(2).values), v[:, None])[:, 0]


seen: list[int] = []


@torch.library.custom_op("streamfx_tests::noted", mutates_args=())
def noted(x: Tensor) -> Tensor:
    seen.append(len(seen))
    return x + len(seen)


noted.register_fake(lambda x: torch.empty_like(x))
noted.register_autograd(lambda ctx, gradient: gradient)


def test_an_unknown_operator_is_not_recomputed() -> None:
    options: dict[str, Any] = {"save": "inputs", "chunk_size": 8, "loss_chunk_size": 8}
    model = torch.compile(Mixing(to_keys(noted)), backend="streambp", options=options)
    model(tokens(2, 37))
    seen.clear()
    model(tokens(2, 37)).backward()
    assert len(seen) == LAYERS


def test_values_between_loops_are_live_for_one_layer_at_a_time() -> None:
    """A layer saves its input, keys and values; sorted keys are recomputed."""
    options = {"chunk_size": 32, "loss_chunk_size": 32, "save": "inputs"}
    models = (Mixing(to_keys(lambda k: k), layers) for layers in (3, 6))
    few, many = (streamfx.explain(model, tokens(2, ROWS), options=options).summary()["peak_bytes"] for model in models)
    stream, weights = 2 * ROWS * WIDTH * 4, 4 * (4 * WIDTH * WIDTH + 4 * WIDTH)
    assert many - few <= 3 * (3 * stream + weights)


# -- between ranks


@pytest.fixture
def ranks() -> Iterator[None]:
    with one_of_many():
        yield


def parallel(kind: type[Layer], layers: int = LAYERS) -> Decoder:
    model = Decoder(layers=layers, width=2 * WIDTH)
    for layer in model.layers:
        layer.__class__ = kind
    return model


@pytest.mark.parametrize("kind", [Gathered, Ulysses])
def test_sequence_parallel_takes_no_more_than_checkpointing(ranks: None, kind: type[Layer]) -> None:
    options = {"chunk_size": 32, "loss_chunk_size": 32}
    found = streamfx.explain(parallel(kind), *data_of(0, 2 * ROWS), options=options)
    assert found.summary()["peak_bytes"] <= found.summary()["checkpointing_peak_bytes"]
    assert len(found.stages) == LAYERS + 1


@pytest.mark.parametrize("kind", [Gathered, Ulysses])
def test_the_order_of_exchanges_depends_on_no_size(ranks: None, kind: type[Layer]) -> None:
    """Not from lengths, chunks, budgets, or the bytes of weights: other ranks have others."""

    def text(rows: int, **options: Any) -> str:
        facts = facts_of(parallel(kind, 2), data_of(0, rows), lambda text, *_, **__: [text], **options)
        (group,) = find_group_names(facts.joint.graph.nodes)
        assert facts.program is not None
        return describe_order_between_loops(facts, group)

    first = text(64)
    assert {text(512, chunk_size=100), text(64, memory_budget="1GiB")} == {first}
    again = [line for line in set(first.splitlines()) if first.splitlines().count(line) == 2]
    assert len(again) == 2 * (2 if kind is Gathered else 4)


def test_values_of_a_single_stage_are_saved(ranks: None) -> None:
    """It would be there at once, and be sent twice."""
    facts = facts_of(parallel(Ulysses, 1), data_of(0, ROWS), lambda text, *_, **__: [text])
    assert not facts.plan.recomputed
