"""What runs between the loops of a stage is made again in the backward half: exact, small, and the same on all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import streamfx
from streamfx.options import SAVE_LEVELS
from streamfx.passes.lowering.collective_order import order_between_loops
from streamfx.passes.ops.collectives import groups_of
from tests.support.collectives import data_of
from tests.support.over_ranks import facts_of, one_of_many
from tests.support.sharded import Decoder, Layer
from tests.test_sequence_parallel import Gathered, Ulysses

LAYERS, WIDTH, ROWS, VOCABULARY = 4, 16, 256, 11


class Mixer(nn.Module):
    """A layer whose rows are mixed by a function that no loop can run, beside a residual stream that loops make."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.mix, self.before, self.after = mix, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.after(self.mix(F.gelu(self.before(x))))


class Mixing(nn.Module):
    def __init__(self, mix: Callable[[Tensor], Tensor], layers: int = LAYERS) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Mixer(mix) for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def heads(x: Tensor) -> tuple[Tensor, ...]:
    return tuple(part[:, None] for part in x.chunk(3, -1))


def backwards(x: Tensor) -> Tensor:
    """Attention of rows in an order that follows from what they hold."""
    order = x[..., 0].argsort(-1)[..., None]
    q, k, v = heads(x.take_along_dim(order, 1))
    return F.scaled_dot_product_attention(q, k, v)[:, 0]


def to_sorted(x: Tensor) -> Tensor:
    """Attention to keys that have been sorted, number by number."""
    q, k, v = heads(x)
    return F.scaled_dot_product_attention(q, k.sort(2).values, v)[:, 0]


def waves(x: Tensor) -> Tensor:
    q, k, v = x.chunk(3, -1)
    return q * torch.fft.fft(k, dim=1).real.sin() + v


def ranked(x: Tensor) -> Tensor:
    q, k, v = x.chunk(3, -1)
    return q * k.sort(1).values.sigmoid() * v.roll(3, 1)


MIXERS = {"backwards": backwards, "to sorted": to_sorted, "waves": waves, "ranked": ranked}


def ids_of(rows: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (2, rows), generator=torch.Generator().manual_seed(rows))


PLANS: dict[str, dict[str, Any]] = {
    **{level: {"save": level} for level in SAVE_LEVELS},
    "every second stage": {"keep_every": 2},
    "attention on the host": {"offload": "attention"},
}
EVERY = [
    pytest.param(plan, mixer, marks=[] if plan == "inputs" or mixer == "ranked" else pytest.mark.long)
    for plan in PLANS
    for mixer in MIXERS
]


@pytest.mark.parametrize(("plan", "mixer"), EVERY)
def test_gradients_are_exact(plan: str, mixer: str) -> None:
    torch.manual_seed(0)
    truth = Mixing(MIXERS[mixer]).double()
    model, ids = copy.deepcopy(truth), ids_of(37)
    loss = truth(ids)
    loss.backward()
    for chunk in (1, 8):
        model.zero_grad()
        torch.compiler.reset()
        given = {"chunk_size": chunk, "loss_chunk_size": chunk, "check_passes": True, **PLANS[plan]}
        streamed = torch.compile(model, backend="streambp", options=given)(ids)
        streamed.backward()
        torch.testing.assert_close(streamed, loss, rtol=0, atol=1e-13)
        for one, other in zip(model.parameters(), truth.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-11, atol=1e-13)


seen: list[int] = []


@torch.library.custom_op("streamfx_tests::noted", mutates_args=())
def noted(x: Tensor) -> Tensor:
    seen.append(len(seen))
    return x + len(seen)


noted.register_fake(lambda x: torch.empty_like(x))
noted.register_autograd(lambda ctx, gradient: gradient)


def test_what_need_not_give_the_same_twice_runs_once() -> None:
    """An operator of another package: nobody knows what it holds."""

    def mix(x: Tensor) -> Tensor:
        q, k, v = heads(x)
        return F.scaled_dot_product_attention(q, noted(k.sort(2).values), v)[:, 0]

    model = torch.compile(Mixing(mix), backend="streambp", options={"save": "inputs", "chunk_size": 8, "loss_chunk_size": 8})
    loss = model(ids_of(37))
    seen.clear()
    loss = model(ids_of(37))
    loss.backward()
    assert len(seen) == LAYERS


def test_what_runs_whole_is_there_for_one_layer_at_a_time() -> None:
    """A layer leaves what enters it, and keys and values for the loop of its attention; not keys that were sorted."""
    options = {"chunk_size": 32, "loss_chunk_size": 32, "save": "inputs"}
    found = [streamfx.explain(Mixing(to_sorted, layers), ids_of(ROWS), options=options).summary() for layers in (3, 6)]
    stream, weights = 2 * ROWS * WIDTH * 4, 4 * (4 * WIDTH * WIDTH + 4 * WIDTH)
    assert found[1]["peak_bytes"] - found[0]["peak_bytes"] <= 3 * (3 * stream + weights)


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
def test_what_ranks_exchange_follows_from_no_size(ranks: None, kind: type[Layer]) -> None:
    """Not from lengths, chunks, budgets, or the bytes of weights: other ranks have others."""

    def text(rows: int, **options: Any) -> str:
        facts = facts_of(parallel(kind, 2), data_of(0, rows), lambda text, *_, **__: [text], **options)
        (group,) = groups_of(facts.joint.graph.nodes)
        assert facts.program is not None
        return order_between_loops(facts, group)

    first = text(64)
    assert {text(8), text(512, chunk_size=100), text(64, memory_budget="1GiB")} == {first}
    again = [line for line in set(first.splitlines()) if first.splitlines().count(line) == 2]
    assert len(again) == 2 * (2 if kind is Gathered else 4)


def test_all_of_it_in_one_stage_is_kept(ranks: None) -> None:
    """It would be there at once, and be sent twice."""
    facts = facts_of(parallel(Ulysses, 1), data_of(0, ROWS), lambda text, *_, **__: [text])
    assert not facts.plan.again
