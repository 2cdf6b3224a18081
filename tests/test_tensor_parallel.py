"""Layers cut over two ranks: exact for any number of chunks, with no more bytes reduced than in eager with checkpointing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from streamfx.errors import RanksDifferError
from tests.support import cut_by_hand
from tests.support.collectives import REDUCE, Step, Wire, data_of, step
from tests.support.cut_by_hand import CutDecoder
from tests.support.ranks import on_ranks
from tests.support.sharded import Decoder
from tests.test_distributed import CHUNK, compiled, in_eager, twins

COLUMNS, ROWS, CHUNKS = ("q", "k", "v", "up"), ("out", "down"), (1, 4)
LENGTH, ALL = CHUNKS[-1] * CHUNK, [0, 1]


def cut(model: nn.Module, ranks: int = 2) -> nn.Module:
    """The model with its layers cut by heads and by columns; embedding, head and loss by words."""
    mesh = init_device_mesh("cpu", (ranks,))
    words: dict[str, Any] = {"embed": RowwiseParallel(input_layouts=Replicate())}
    words["head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh, words)
    plan: dict[str, Any] = {name: ColwiseParallel() for name in COLUMNS} | {name: RowwiseParallel() for name in ROWS}
    for layer in model.layers:  # type: ignore[union-attr]
        parallelize_module(layer, mesh, plan)
    return model


def steps_of_chunks() -> dict[str, Step]:
    """Steps of all numbers of chunks, each compiled by itself, and of eager with checkpointing."""
    found, whole = {}, {"layers": 2, "vocabulary": 18}
    with loss_parallel():
        for chunks in CHUNKS:
            torch._dynamo.reset()
            model, truth = twins(**whole)
            rows = LENGTH // chunks
            run = compiled(cut(model), strict=True, chunk_size=rows, loss_chunk_size=rows)
            run(*data_of(0, LENGTH)).backward()  # compiles
            found[f"{chunks} chunks"] = step(run, model, truth, LENGTH, groups=1)
        model, truth = twins(**whole)
        found["eager"] = in_eager(cut(model), truth, groups=1, length=LENGTH)
    return found


def by_hand(chunk: int | str, heads: tuple[int, int], inner: tuple[int, int]) -> tuple[float, int]:
    """The largest error of a gradient of layers that are cut by hand, and how often a step reduces."""
    torch._dynamo.reset()
    truth, _ = twins(layers=1, width=16)
    model, data = CutDecoder(copy.deepcopy(truth), heads, inner), data_of(0, 4 * CHUNK)
    run = compiled(model, chunk_size=chunk, loss_chunk_size=CHUNK)
    truth(*data).backward()
    run(*data)  # compiles
    wire = Wire.of(lambda: run(*data).backward())
    return model.error(truth), wire.calls[REDUCE]


def of_a_sum(x: Tensor, weight: Tensor) -> Tensor:
    """Sums over rows, reduced over ranks in ways in which no sum of parts can be, beside rows that are."""
    h = F.scaled_dot_product_attention(x @ weight, x, x, is_causal=True)
    most, least = (all_reduce(part, op, ALL) for part, op in ((h.sum(-2), "max"), (h.square().sum(-2), "min")))
    return all_reduce(h, "max", ALL).sum() + (h * most[..., None, :] + least[..., None, :]).sum()


def reduced_sums(rank: int) -> float:
    torch._dynamo.reset()
    x = torch.randn(1, 2, 4 * CHUNK, 4, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    weight = torch.eye(4, dtype=torch.float64)
    with torch.no_grad():
        own, true = (
            call(x, weight) for call in (torch.compile(of_a_sum, backend="streambp", options={"chunk_size": CHUNK}), of_a_sum)
        )
    return (own - true).abs().item() / true.abs().item()


def by_expert(x: Tensor, weight: Tensor) -> Tensor:
    """Rows in an order of their own on each rank, which are reduced there, and put back."""
    rows = F.scaled_dot_product_attention(x @ weight, x, x, is_causal=True).flatten(0, -2)
    order = (rows[:, 0] > 0).long().argsort(stable=True)
    reduced = all_reduce(rows[order] @ weight, "sum", ALL)
    return (rows + reduced[order.argsort()]).square().sum()


def read_by_one(x: Tensor, weight: Tensor) -> Any:
    """Rows and numbers that are reduced on all ranks, and read on the first."""
    h = F.scaled_dot_product_attention(x @ weight, x, x, is_causal=True)
    seen = [all_reduce(h.detach(), "max", ALL), all_reduce(h.detach().sum(), "sum", ALL)]
    return h.square().sum() + sum(part.sum() for part in seen) if dist.get_rank() == 0 else h.square().sum()


def of_own_rows(rank: int) -> dict[str, float]:
    """How far from eager's, on the same ranks: results and gradients of functions of rows that differ per rank."""
    found = {}
    for function in (by_expert, read_by_one):
        torch._dynamo.reset()
        x = torch.randn(1, 2, 4 * CHUNK, 4, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
        weight = torch.eye(4, dtype=torch.float64, requires_grad=True)
        compiled_one = torch.compile(function, backend="streambp", options={"chunk_size": CHUNK})
        pairs = []
        for call in (compiled_one, function):
            result = call(x, weight)
            pairs.append((result.detach() + 0, *torch.autograd.grad(result, weight)))
        found[function.__name__] = max((own - true).abs().max().item() for own, true in zip(*pairs, strict=True))
    return found


def failures(rank: int) -> list[str]:
    """What a rank says where rank 1 cannot analyse a graph, and where rank 1 does not compile it at all."""
    found = []
    model = CutDecoder(Decoder(layers=1).double(), (1, 1), (8, 8))
    torch._dynamo.reset()
    fault = (
        mock.patch("streamfx.frontend.backend.run_pipeline", side_effect=ValueError("no such axis")) if rank else mock.MagicMock()
    )
    with fault:
        found.append(_refusal(lambda: compiled(model)(*data_of(0, 4 * CHUNK))))
    torch._dynamo.reset()
    with mock.patch("streamfx.torch_private.ranks.LIMIT", timedelta(seconds=1)):
        found.append(_refusal(lambda: compiled(model)(*data_of(0, 4 * CHUNK))) if rank == 0 else "")
    return found


def _refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except RanksDifferError as error:
        return str(error)
    return "no error"


def measured(rank: int) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    return {
        "steps": steps_of_chunks(),
        "other sizes": by_hand(CHUNK, (3, 1), (20, 12)),
        "other sizes, auto": by_hand("auto", (3, 1), (20, 12)),
        "sums": reduced_sums(rank),
        "own rows": of_own_rows(rank),
        "failures": failures(rank),
    }


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return on_ranks(measured)


@pytest.mark.parametrize("chunks", CHUNKS)
def test_gradients_are_those_of_one_process(found: list[dict[str, Any]], chunks: int) -> None:
    own = found[0]["steps"][f"{chunks} chunks"]
    assert own.loss_error < 1e-12 and own.error < 1e-12


@pytest.mark.parametrize("chunks", CHUNKS)
def test_no_more_bytes_are_reduced_than_in_eager_with_checkpointing(found: list[dict[str, Any]], chunks: int) -> None:
    """Of the gradients that come from queries, keys and values the sum alone: in two layers, four reductions less."""
    steps = found[0]["steps"]
    own, eager = steps[f"{chunks} chunks"], steps["eager"]
    row = 8 * 8  # bytes
    assert own.forward.bytes[REDUCE] == eager.forward.bytes[REDUCE]
    assert own.backward.bytes[REDUCE] == eager.backward.bytes[REDUCE] - 4 * LENGTH * row
    assert own.forward.calls[REDUCE] == chunks * eager.forward.calls[REDUCE]
    assert own.backward.calls[REDUCE] == chunks * (eager.backward.calls[REDUCE] - 4)


def test_parts_may_have_other_sizes_on_other_ranks(found: list[dict[str, Any]]) -> None:
    """Chunks that follow from sizes would differ: rows are then reduced between loops, once for all chunks."""
    (error, calls), (auto_error, auto_calls) = (found[0][name] for name in ("other sizes", "other sizes, auto"))
    assert error < 1e-12 and auto_error < 1e-12
    assert calls == 4 * 5 and auto_calls <= 5  # of a layer: two forward, one again, two backward


def test_sums_over_chunks_are_reduced_once_they_are_complete(found: list[dict[str, Any]]) -> None:
    assert max(own["sums"] for own in found) < 1e-12


@pytest.mark.parametrize("name", [by_expert.__name__, read_by_one.__name__])
def test_rows_of_each_rank_meet_those_in_the_same_place(found: list[dict[str, Any]], name: str) -> None:
    """Not those that they would meet in another order; and they meet, whoever reads the result."""
    assert max(own["own rows"][name] for own in found) < 1e-9


def test_ranks_that_fail_tell_the_others(found: list[dict[str, Any]]) -> None:
    (elsewhere, alone), (here, _) = (own["failures"] for own in found)
    assert "another rank does not run this graph" in elsewhere and "ValueError: no such axis" in elsewhere
    assert "this rank could not analyse" in here
    assert "nothing from rank 1 within 1 seconds" in alone


# -- other plans


def by_sequence(rank: int) -> Step:
    """Norms on rows of each rank's own: what is between them is gathered, and scattered again."""
    model, truth = twins(layers=2)
    mesh = init_device_mesh("cpu", (2,))
    own: dict[str, Any] = {"norm": SequenceParallel(use_local_output=True)}
    own |= {name: ColwiseParallel(input_layouts=Shard(1)) for name in COLUMNS}
    own |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in ROWS}
    words = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, words)  # type: ignore[arg-type]
    for layer in model.layers:
        parallelize_module(layer, mesh, own)  # type: ignore[arg-type]
    return step(compiled(model), model, truth, 4 * CHUNK, groups=1)


@pytest.mark.long
def test_sequence_parallel_is_exact() -> None:
    own = on_ranks(by_sequence)[0]
    assert own.loss_error < 1e-12 and own.error < 1e-12


def sharded_and_cut(rank: int) -> float:
    """A mesh of two groups with data and lengths of their own, which share weights; each cuts its layers over two ranks."""
    truth, _ = twins(layers=2, width=16)
    mesh, lengths, group = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor")), (16, 40), rank // 2
    cut_by_hand.cut_over.append(mesh["tensor"].get_group())
    model = CutDecoder(copy.deepcopy(truth), (3, 1), (20, 12))
    for layer in model.layers:
        layer.shard(mesh["data"])  # type: ignore[operator]
    torch.stack([truth(*data_of(other, length)) / 2 for other, length in enumerate(lengths)]).sum().backward()
    compiled(model, strict=True)(*data_of(group, lengths[group])).backward()
    return model.error(truth)


@pytest.mark.long
def test_weights_may_be_sharded_beside() -> None:
    assert max(on_ranks(sharded_and_cut, world=4)) < 1e-12


def at_random(rank: int, seed: int) -> list[float]:
    """Some layers' products are cut, each pair of them or not; the model is whatever the seed says."""
    found, draw = [], torch.Generator().manual_seed(seed)
    mesh = init_device_mesh("cpu", (2,))

    def chance(most: int) -> int:
        return int(torch.randint(most, (1,), generator=draw))

    for _ in range(4):
        torch._dynamo.reset()
        model, truth = twins(layers=1 + chance(3), tied=bool(chance(2)))
        for layer in model.layers:
            plan: dict[str, Any] = {}
            for columns, rows in ((("q", "k", "v"), "out"), (("up",), "down")):
                if chance(3):
                    plan |= {name: ColwiseParallel() for name in columns} | {rows: RowwiseParallel()}
                elif chance(2):  # each product by itself: its rows are gathered, or added up
                    plan |= {name: ColwiseParallel(output_layouts=Replicate()) for name in columns}
                    plan[rows] = RowwiseParallel(input_layouts=Replicate())
            parallelize_module(layer, mesh, plan)
        length, chunk = 5 + chance(60), 3 + chance(20)
        save = ("auto", "inputs", "attention", "projections", "products")[chance(5)]
        run = compiled(model, chunk_size=chunk, loss_chunk_size=chunk, save=save, keep_every=1 + chance(2))
        own = step(run, model, truth, length, groups=1)
        found += [own.loss_error, own.error]
    return found


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_plans_at_random_are_exact(seed: int) -> None:
    assert max(on_ranks(at_random, seed)[0]) < 1e-12
