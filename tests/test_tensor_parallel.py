"""Layers cut over two ranks in several ways: exact, on ranks whose rows, parts and lengths differ."""

import copy
import os
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor_autograd, all_reduce, all_to_all_single_autograd
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from streamfx.errors import RanksDifferError
from tests.support.collectives import REDUCE, Wire, data_of, step, worst
from tests.support.cut_by_hand import CutDecoder
from tests.support.engines import CHUNK, COLUMNS, ROWS, TOLERANCE, all_ranks, compiled, cut, twins
from tests.support.ranks import on_ranks
from tests.support.sharded import Decoder, Layer

LENGTH, ALL = 4 * CHUNK, [0, 1]
pytestmark = pytest.mark.compiled


def by_hand(chunk: int | str) -> tuple[float, int]:
    """The largest error of a gradient of layers that are cut by hand into unequal parts, and how often a step reduces."""
    truth, _ = twins(partial(Decoder, layers=1, width=16))
    model, data = CutDecoder(copy.deepcopy(truth), (3, 1), (20, 12)), data_of(0, LENGTH)
    run = compiled(model, chunk_size=chunk)
    truth(*data).backward()
    run(*data)  # compiles
    wire = Wire.of(lambda: run(*data).backward())
    return model.error(truth), wire.calls[REDUCE]


def causal(x: Tensor, weight: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x @ weight, x, x, is_causal=True)


def of_a_sum(x: Tensor, weight: Tensor) -> Tensor:
    """Sums over rows, reduced over ranks by operations that partial sums do not commute with, and reduced rows."""
    h = causal(x, weight.detach())
    most, least = (all_reduce(part, op, ALL) for part, op in ((h.sum(-2), "max"), (h.square().sum(-2), "min")))
    seen = all_reduce(h, "max", ALL).sum() + (h * most[..., None, :] + least[..., None, :]).sum()
    return seen + weight.sum()


def by_expert(x: Tensor, weight: Tensor) -> Tensor:
    """Rows that each rank sorts differently, reduces, and restores."""
    rows = causal(x, weight).flatten(0, -2)
    order = (rows[:, 0] > 0).long().argsort(stable=True)
    return (rows + all_reduce(rows[order] @ weight, "sum", ALL)[order.argsort()]).square().sum()


def read_by_one(x: Tensor, weight: Tensor) -> Any:
    """Rows and numbers that are reduced on all ranks, and read on the first."""
    h = causal(x, weight)
    seen = [all_reduce(h.detach(), "max", ALL), all_reduce(h.detach().sum(), "sum", ALL)]
    return h.square().sum() + sum(part.sum() for part in seen) if dist.get_rank() == 0 else h.square().sum()


FUNCTIONS = (of_a_sum, by_expert, read_by_one)


def of_own_rows(rank: int, function: Callable[[Tensor, Tensor], Tensor]) -> float:
    """How far from eager's, on the same ranks: result and gradient of a function of rows that differ per rank."""
    torch._dynamo.reset()
    x = torch.randn(1, 2, LENGTH, 4, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    weight, pairs = torch.eye(4, dtype=torch.float64, requires_grad=True), []
    for call in (torch.compile(function, backend="streambp", options={"chunk_size": CHUNK}), function):
        result = call(x, weight)
        pairs.append((result.detach() + 0, *torch.autograd.grad(result, weight)))
    return max(((own - true).abs().max() / true.abs().max()).item() for own, true in zip(*pairs, strict=True))


def failure(rank: int) -> str:
    """Return a rank's error if rank 1 cannot analyze a graph."""
    torch._dynamo.reset()
    fault = (
        mock.patch("streamfx.frontend.backend.run_pipeline", side_effect=ValueError("no such axis")) if rank else nullcontext()
    )
    with fault, pytest.raises(RanksDifferError) as caught:
        compiled(CutDecoder(Decoder(layers=1).double(), (1, 1), (8, 8)))(*data_of(0, LENGTH))
    return str(caught.value)


def measured(rank: int) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    return {
        "other sizes": [by_hand(CHUNK), by_hand("auto")],
        "own rows": {function.__name__: of_own_rows(rank, function) for function in FUNCTIONS},
        "failure": failure(rank),
    }


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return on_ranks(measured)


def test_ranks_may_have_parts_of_different_sizes(found: list[dict[str, Any]]) -> None:
    """Chunks that follow from sizes would differ: rows are then reduced between loops, once for all chunks."""
    (error, calls), (auto_error, auto_calls) = found[0]["other sizes"]
    assert error < TOLERANCE and auto_error < TOLERANCE
    assert calls == 4 * 5 and auto_calls <= 5  # per layer: two forward, one recomputed, two backward


@pytest.mark.parametrize("name", [function.__name__ for function in FUNCTIONS])
def test_rows_are_reduced_with_rows_at_the_same_position(found: list[dict[str, Any]], name: str) -> None:
    """The order of rows stays the same, and all ranks reduce even if one of them does not read the result."""
    assert max(own["own rows"][name] for own in found) < TOLERANCE


def test_a_failing_rank_notifies_the_others(found: list[dict[str, Any]]) -> None:
    elsewhere, here = (own["failure"] for own in found)
    assert "another rank does not run this graph" in elsewhere and "ValueError: no such axis" in elsewhere
    assert "this rank could not analyze" in here


# -- other plans


def by_sequence(rank: int) -> float:
    """Norms on each rank's rows; values between norms are gathered and scattered."""
    model, truth = twins(partial(Decoder, layers=2))
    own: dict[str, Any] = {"norm": SequenceParallel(use_local_output=True)}
    own |= {name: ColwiseParallel(input_layouts=Shard(1)) for name in COLUMNS}
    own |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in ROWS}
    words: dict[str, Any] = {"embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))}
    words["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    parallelize_module(model, all_ranks(), words)
    for layer in model.layers:
        parallelize_module(layer, all_ranks(), own)
    found = step(compiled(model), model, truth, LENGTH, groups=1)
    return max(found.loss_error, found.error)


def at_random(rank: int, seed: int) -> float:
    """Random models with randomly cut matmuls."""
    worst_of_all, draw = 0.0, torch.Generator().manual_seed(seed)

    def chance(most: int) -> int:
        return int(torch.randint(most, (1,), generator=draw))

    for _ in range(4):
        model, truth = twins(partial(Decoder, layers=1 + chance(3), tied=bool(chance(2))))
        for layer in model.layers:
            plan: dict[str, Any] = {}
            for columns, rows in ((("q", "k", "v"), "out"), (("up",), "down")):
                if chance(3):
                    plan |= {name: ColwiseParallel() for name in columns} | {rows: RowwiseParallel()}
                elif chance(2):  # each product by itself: its rows are gathered, or added up
                    plan |= {name: ColwiseParallel(output_layouts=Replicate()) for name in columns}
                    plan[rows] = RowwiseParallel(input_layouts=Replicate())
            parallelize_module(layer, all_ranks(), plan)
        length, chunk = 5 + chance(60), 3 + chance(20)
        save = ("auto", "inputs", "attention", "projections", "products")[chance(5)]
        run = compiled(model, chunk_size=chunk, loss_chunk_size=chunk, save=save, keep_every=1 + chance(2))
        own = step(run, model, truth, length, groups=1)
        worst_of_all = max(worst_of_all, own.loss_error, own.error)
    return worst_of_all


PLANS: dict[str, Callable[[int], float]] = {"SequenceParallel": by_sequence}
PLANS |= {f"at random {seed}": partial(at_random, seed=seed) for seed in range(4)}


@pytest.mark.long
@pytest.mark.parametrize("name", PLANS)
def test_other_plans_are_exact(name: str) -> None:
    assert max(on_ranks(PLANS[name])) < TOLERANCE


# -- several lengths: torch makes the length a symbol


def of_several_lengths(rank: int, folder: str | None) -> list[tuple[float, int]]:
    """By length, the error of a step, and how many graphs were compiled by then; of our model, or one that transformers cuts."""
    torch.set_default_dtype(torch.float64)
    if folder is None:
        plain, truth = twins(partial(Decoder, layers=1, vocabulary=18))
        model = cut(plain)
    else:
        import transformers

        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
        load = partial(transformers.AutoModelForCausalLM.from_pretrained, folder, dtype=torch.float64)
        truth, model = load(), load(tp_plan="auto")
    calls, found = (compiled(model, strict=folder is None), truth), []
    for length in (24, 40, 33):
        ids, labels = data_of(0, length)
        model.zero_grad()
        truth.zero_grad()
        with loss_parallel():
            losses = [call(ids, labels) if folder is None else call(input_ids=ids, labels=labels).loss for call in calls]
            for loss in losses:
                loss.backward()
        own = losses[0].full_tensor() if isinstance(losses[0], DTensor) else losses[0]
        error = max((own - losses[1]).abs().item(), worst(model, truth))
        found.append((error, torch._dynamo.utils.counters["stats"]["unique_graphs"]))
    return found


@pytest.mark.long
@pytest.mark.parametrize("library", [None, "transformers"])
def test_gradients_of_several_lengths(library: str | None, tmp_path: Path) -> None:
    """DTensor takes `sym_max(length, 1)` for a gradient, whose symbol is the length's: tracing ended in a RecursionError.

    The third length does not recompile.
    """
    if library:
        transformers = pytest.importorskip("transformers")
        sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
        config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
        transformers.LlamaForCausalLM(config).double().save_pretrained(tmp_path)
    errors, (first, second, third) = zip(*on_ranks(of_several_lengths, str(tmp_path) if library else None)[0], strict=True)
    assert max(errors) < (1e-6 if library else TOLERANCE)
    assert first < second == third or library


# -- sequence parallel by hand: a rank has a part of the rows, and gathers keys, or swaps rows for heads (Ulysses)

HEAD, UNEVEN = 4, (20, 12)
OPTIONS: dict[str, Any] = {"chunk_size": 8, "loss_chunk_size": 8, "check_passes": True}


def everybody() -> list[int]:
    return list(range(dist.get_world_size()))


class Gathered(Layer):
    """Queries of a rank's own rows, keys and values of all."""

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (all_gather_tensor_autograd(part.contiguous(), 2, everybody()) for part in (k, v))
        return by_own_rows(q, k, v, dist.get_rank() * q.shape[2])


def by_own_rows(q: Tensor, k: Tensor, v: Tensor, before: int) -> Tensor:
    row, column = torch.arange(q.shape[2]) + before, torch.arange(k.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=row[:, None] >= column)


class Ulysses(Layer):
    """Queries, keys and values of all rows, for a part of the heads."""

    def by_heads(self, part: Tensor) -> Tensor:
        """[b t h e] -> [b h/w wt e]"""
        sent = part.unflatten(2, (dist.get_world_size(), -1)).permute(2, 1, 0, 3, 4).contiguous()
        return all_to_all_single_autograd(sent, None, None, everybody()).flatten(0, 1).permute(1, 2, 0, 3)

    def by_rows(self, mixed: Tensor) -> Tensor:
        """[b h/w wt e] -> [b t he]"""
        sent = mixed.permute(2, 0, 1, 3).unflatten(0, (dist.get_world_size(), -1)).contiguous()
        return all_to_all_single_autograd(sent, None, None, everybody()).permute(2, 1, 0, 3, 4).flatten(2)


class FewKeys(Layer):
    """Two heads of queries share a head of keys and values."""

    def parts(self, h: Tensor) -> Iterable[Tensor]:
        steps = ((self.q, 1), (self.k, 2), (self.v, 2))
        return (self.by_heads(project(h).unflatten(-1, (-1, HEAD))[:, :, ::step]) for project, step in steps)

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class FewKeysByHeads(FewKeys, Ulysses):
    """The same of all rows, for a part of the heads, which attend in groups."""


class Swapped(Layer):
    """Queries of a rank's own rows, keys and values of all; ranks have other numbers of rows, and send them all to all."""

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        own, count = torch.cat([k, v], -1).movedim(2, 0).contiguous(), q.shape[2]
        sent = torch.cat([own] * len(UNEVEN)).flatten(1)
        every = all_to_all_single_autograd(sent, list(UNEVEN), [count] * len(UNEVEN), everybody()).unflatten(1, own.shape[1:])
        k, v = every.movedim(0, 2).chunk(2, -1)
        return by_own_rows(q, k, v, sum(UNEVEN[: dist.get_rank()]))


def error_of(rank: int, kind: type[Layer], rows: tuple[int, ...] = (), heads: int = 1) -> float:
    """The largest error of a gradient: each rank has the loss of its own rows, and some heads."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    truth = Decoder(layers=2, width=dist.get_world_size() * heads * HEAD)
    model: Any = copy.deepcopy(truth)
    for layer, other in zip(model.layers, truth.layers, strict=True):
        layer.__class__, other.__class__ = kind, FewKeys if issubclass(kind, FewKeys) else Layer
    rows = rows or (20,) * dist.get_world_size()
    data = data_of(0, sum(rows))
    truth(*data).backward()
    own = [part.split(rows, 1)[rank] for part in data]
    run = torch.compile(model, backend="streambp", options=OPTIONS)
    (run(*own) * rows[rank] / sum(rows)).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    return worst(model, truth)


def test_ranks_with_different_lengths_repeat_exchanges() -> None:
    """The backward repeats the exchange, with parts of different sizes."""
    assert max(on_ranks(error_of, Swapped, UNEVEN)) < 1e-12


@pytest.mark.parametrize("kind", [FewKeysByHeads, pytest.param(Ulysses, marks=pytest.mark.long)])
def test_groups_of_heads_have_the_gradients_of_one_process(kind: type[Layer]) -> None:
    assert max(on_ranks(error_of, kind, (), 4)) < 1e-12


@pytest.mark.long
@pytest.mark.parametrize(("kind", "world"), [(Gathered, 2), (Gathered, 5), (Ulysses, 3), (Ulysses, 4)])
def test_gradients_are_those_of_one_process(kind: type[Layer], world: int) -> None:
    assert max(on_ranks(error_of, kind, world=world)) < 1e-12
