"""Attention between exchanges of ranks, a group of heads at a time: exact, the same on all ranks, and as large as it is told."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx

import streamfx
from streamfx.ir.joint import node_argument, shape_of_node
from streamfx.kernels.sdpa import ATTENTION, ATTENTION_BACKWARD
from streamfx.passes.rewrite.attention import head_groups
from streamfx.torch_private.allocations import allocations
from tests.support.collectives import data_of, worst
from tests.support.over_ranks import WORLD, facts_of, one_of_many
from tests.support.ranks import on_ranks
from tests.support.sharded import Decoder, Layer
from tests.support.spread import only
from tests.test_sequence_parallel import Ulysses

pytestmark = pytest.mark.long

CHUNK, ROWS, HEAD = 8, 32, 4
OPTIONS: dict[str, Any] = {"chunk_size": CHUNK, "loss_chunk_size": CHUNK, "check_passes": True, "bodies": "eager"}
TOLERANCE = 0.05


class Few(Layer):
    """Heads of queries share those of some keys; all rows are here."""

    keys = 2

    def parts(self, x: Tensor) -> Iterator[Tensor]:
        h = self.norm(x)
        q, k, v = (project(h).unflatten(-1, (-1, HEAD)) for project in (self.q, self.k, self.v))
        return iter((q, k[:, :, : self.keys], v[:, :, : self.keys]))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in self.parts(x))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.behind(x, mixed.transpose(1, 2).flatten(-2))

    def behind(self, x: Tensor, mixed: Tensor) -> Tensor:
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(x)))


class FewByHeads(Few, Ulysses):
    """The same of all rows, for a part of the heads."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(self.by_heads, self.parts(x))
        return self.behind(x, self.by_rows(self.attended(q, k, v)))

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Masked(FewByHeads):
    """With numbers that all heads add to scores."""

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = torch.arange(q.shape[2])
        mask = (0.1 * (rows - rows[:, None])).masked_fill(rows > rows[:, None], float("-inf")).to(q.dtype)[None, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class ReadTwice(FewByHeads):
    """Somebody else reads what ranks have sent: queries of all rows and heads."""

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attended(q, k, v) + q.mean()


def decoder(kind: type[Few], width: int, keys: int, layers: int = 2) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(layers=layers, width=width)
    for layer in model.layers:
        layer.__class__ = kind
        layer.keys = keys  # type: ignore[assignment]
    return model


# -- the same numbers


def error_of(rank: int, width: int, keys: int, options: dict[str, Any]) -> float:
    """The largest error of a gradient: each rank has the loss of its own rows."""
    torch.set_default_dtype(torch.float64)
    truth = decoder(Few, width, keys)
    model: Any = copy.deepcopy(truth)
    for layer in model.layers:
        layer.__class__ = FewByHeads
    world = dist.get_world_size()
    data = data_of(0, world * ROWS)
    truth(*data).backward()
    own = [part.split(ROWS, 1)[rank] for part in data]
    (torch.compile(model, backend="streambp", options={**OPTIONS, **options})(*own) / world).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    return worst(model, truth)


CASES = [(8, 8), (8, 2), (8, 4), (6, 6)]


@pytest.mark.parametrize(("heads", "keys"), only([(8, 4)], CASES))
@pytest.mark.parametrize("save", only(["inputs"], ["inputs", "attention"]))
def test_gradients_are_those_of_one_process(heads: int, keys: int, save: str) -> None:
    assert max(on_ranks(error_of, heads * HEAD, keys, {"save": save})) < 1e-12


@pytest.mark.long
def test_on_four_ranks() -> None:
    assert max(on_ranks(error_of, 16 * HEAD, 4, {"save": "inputs"}, world=4)) < 1e-12


# -- what runs


@pytest.fixture
def ranks() -> Iterator[None]:
    with one_of_many():
        yield


def attentions(model: Decoder) -> list[fx.Node]:
    facts = facts_of(model, data_of(0, 64), lambda text, *_, **__: [text], save="inputs")
    return [node for node in facts.joint.nodes if node.target in (ATTENTION, ATTENTION_BACKWARD)]


@pytest.mark.parametrize(
    ("kind", "heads", "keys", "groups"),
    only(
        [(FewByHeads, 8, 2, 4), (ReadTwice, 4, 2, 1)],
        [
            (FewByHeads, 4, 4, 4),
            (FewByHeads, 4, 1, 4),
            (FewByHeads, 8, 2, 4),
            (FewByHeads, 6, 2, 2),
            (FewByHeads, 5, 5, 5),
            (FewByHeads, 1, 1, 1),
            (Masked, 4, 4, 1),
            (ReadTwice, 4, 2, 1),
        ],
    ),
)
def test_groups_of_heads(ranks: None, kind: type[Few], heads: int, keys: int, groups: int) -> None:
    """Of a rank. Attention with a mask stays as it is, and so does what somebody else reads."""
    layers = 2
    found = attentions(decoder(kind, WORLD * heads * HEAD, WORLD * keys, layers))
    assert len(found) == 2 * layers * groups
    assert {shape_of_node(node_argument(node))[1] for node in found} == {heads // groups}


@pytest.mark.parametrize("keys", [8, 2])
def test_less_is_there_at_once(ranks: None, keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = decoder(FewByHeads, WORLD * 8 * HEAD, WORLD * keys), data_of(0, 1024)
    options = {"chunk_size": 32, "loss_chunk_size": 32, "save": "inputs"}
    peaks = []
    for groups in (head_groups._groups, lambda _: 1):
        monkeypatch.setattr(head_groups, "_groups", groups)
        peaks.append(streamfx.explain(model, *data, options=options).summary()["peak_bytes"])
    assert peaks[0] < 0.98 * peaks[1]


# -- as much as it is told


BYTES: dict[str, Any] = {"chunk_size": 256, "loss_chunk_size": 256, "save": "inputs", "bodies": "eager"}
BATCH, LENGTHS = 8, (256, 512, 1024)  # so much that what a CPU's kernel takes for a thread, which no plan counts, is little
HEADS, KEYS = 32, 8  # of all ranks


def frees_are_seen() -> torch.library.Library:
    """The profiler sees what this thread frees. A collective's tensors are freed by gloo's thread if this thread drops them
    first: each wait begins after all ranks have sent, and gloo's thread has dropped them.
    """
    group = dist.new_group()
    operator = torch.ops._c10d_functional.wait_tensor.default
    kernel = torch.library.get_kernel(operator, "CPU")

    def wait(keys: torch.DispatchKeySet, x: Tensor) -> Tensor:
        dist.barrier(group)
        time.sleep(0.01)
        found: Tensor = kernel.call_boxed(keys, x)
        return found

    library = torch.library.Library("_c10d_functional", "IMPL")
    library.impl("wait_tensor", wait, "CPU", with_keyset=True, allow_override=True)
    return library  # which overrides the kernel as long as it is alive


def measured(rank: int) -> list[int]:
    """Bytes of a step besides its model, by the allocator. The least of a few steps."""
    library = frees_are_seen()
    torch.set_default_dtype(torch.float32)
    model, found = decoder(FewByHeads, HEADS * HEAD, KEYS), []
    for rows in LENGTHS:
        data = [part.repeat(BATCH, 1) for part in data_of(rank, rows)]
        torch._dynamo.reset()
        run = torch.compile(model, backend="streambp", options=BYTES, dynamic=False)
        peaks = list[int]()
        for _ in range(2):
            model.zero_grad()
            with allocations() as taken:
                run(*data).backward()
            assert taken.is_complete
            peaks.append(max(accumulate(size for _, size, _ in taken.moves)))
        found.append(min(peaks))
    library._destroy()
    return found


def told(world: int) -> list[int]:
    """The same as it is predicted."""
    model, found = decoder(FewByHeads, HEADS * HEAD, KEYS), []
    for rows in LENGTHS:
        with one_of_many(world):
            data = [part.repeat(BATCH, 1) for part in data_of(0, rows)]
            found.append(streamfx.explain(model, *data, options=BYTES).summary()["peak_bytes"])
    return found


@pytest.mark.parametrize("world", only([2], [2, 4]))
def test_predicted_bytes_are_those_of_a_step(world: int) -> None:
    expected = told(world)
    for found in on_ranks(measured, world=world, limit=600):
        assert found == pytest.approx(expected, rel=TOLERANCE)
