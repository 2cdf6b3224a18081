"""Parts of a model that are compiled by themselves: stages of a pipeline on two ranks, and blocks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

import streamfx
from tests.support.ranks import on_ranks
from tests.support.sharded import Layer

VOCABULARY, WIDTH, PARTS, LENGTH = 17, 8, 4, 24
OPTIONS: dict[str, Any] = {"chunk_size": 8, "loss_chunk_size": 8}


class Stage(nn.Module):
    """A layer; in the first stage after the embedding, in the last one before the head."""

    def __init__(self, number: int, stages: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH) if number == 0 else nn.Identity()
        self.layer = Layer(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False) if number == stages - 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(x)))  # type: ignore[no-any-return]


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def stagewise(stage: Stage) -> None:
    streamfx.enable(stage, **OPTIONS)


def layerwise(stage: Stage) -> None:
    stage.layer.compile(backend="streambp", options=OPTIONS)


WAYS: dict[str, Callable[[Stage], None]] = {"the stage": stagewise, "its layers": layerwise}


def stages_of(rank: int, schedule: str, count: int) -> list[int]:
    """Which stages a rank has: every second one, or the first and the last of four."""
    v_shaped = ([0, 3], [1, 2])
    return v_shaped[rank] if "ZBV" in schedule else list(range(rank, count, 2))


def trained(rank: int, schedule: str, way: str) -> list[float]:
    """The largest error of a gradient in each of two steps, against one process."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    made = getattr(schedules, schedule)
    count = 4 if issubclass(made, schedules.PipelineScheduleMulti) else 2
    parts = [Stage(number, count) for number in range(count)]
    truth, own = copy.deepcopy(parts), stages_of(rank, schedule, count)
    for number in own:
        WAYS[way](parts[number])
    stages = [PipelineStage(parts[number], number, count, torch.device("cpu")) for number in own]
    run = made(stages if count == 4 else stages[0], PARTS, loss_fn=loss_of)
    ids, labels = torch.randint(VOCABULARY, (2, PARTS, LENGTH))
    return [error_of_step(run, ids, labels, [(parts[number], truth[number]) for number in own], truth) for _ in range(2)]


def error_of_step(run: Any, ids: Tensor, labels: Tensor, pairs: list[tuple[Stage, Stage]], truth: list[Stage]) -> float:
    for part in (*truth, *(own for own, _ in pairs)):
        part.zero_grad()
    logits = nn.Sequential(*truth)(ids)
    torch.stack([loss_of(*part) for part in zip(logits.chunk(PARTS), labels.chunk(PARTS), strict=True)]).mean().backward()
    is_first, is_last = (any(true is truth[place] for _, true in pairs) for place in (0, -1))
    run.step(*((ids,) if is_first else ()), **({"target": labels, "losses": []} if is_last else {}))
    errors = []
    for own, true in pairs:
        for mine, theirs in zip(own.parameters(), true.parameters(), strict=True):
            assert mine.grad is not None and theirs.grad is not None
            errors.append((mine.grad - theirs.grad).abs().max().item())
    return max(errors)


ZERO_BUBBLE = "ScheduleInterleavedZeroBubble"
MORE = [("Schedule1F1B", "the stage"), ("ScheduleZBVZeroBubble", "the stage"), (ZERO_BUBBLE, "its layers")]


@pytest.mark.parametrize(
    ("schedule", "way"), [(ZERO_BUBBLE, "the stage"), *(pytest.param(*case, marks=pytest.mark.long) for case in MORE)]
)
def test_gradients_are_those_of_one_process(schedule: str, way: str) -> None:
    assert max(map(max, on_ranks(trained, schedule, way))) < 1e-13


def test_one_node_of_autograd_has_the_gradient_of_the_head() -> None:
    """The compiled backward half had an edge to the head's weight, too. torch's pipelines then put the weights into two groups
    that share this node, and ran it for each: "Trying to backward through the graph a second time".
    """
    stage = Stage(1, 2)
    call = torch.compile(stage, backend="streambp", options=OPTIONS)
    loss = loss_of(call(torch.randn(1, LENGTH, WIDTH, requires_grad=True)), torch.randint(VOCABULARY, (1, LENGTH)))
    assert [type(node).__name__ for node in nodes_that_lead_to(stage.get_parameter("head.weight"), loss)] == [
        "DeferredOutputBackward"
    ]


def nodes_that_lead_to(leaf: Tensor, result: Tensor) -> list[Any]:
    """Nodes with an edge to where a leaf's gradient is accumulated."""
    known, waiting = set[Any](), [result.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in known:
            known.add(node)
            waiting += [following for following, _ in node.next_functions]
    return [node for node in known if any(getattr(to, "variable", None) is leaf for to, _ in node.next_functions)]


# -- blocks, as torchtitan compiles them


def test_blocks_by_themselves_keep_whole_logits() -> None:
    """`enable` on the model has the head and its loss in chunks, in which no logits are stored."""
    model = Stage(1, 2)
    x, labels = torch.randn(1, LENGTH, WIDTH), torch.randint(VOCABULARY, (1, LENGTH))
    true = torch.autograd.grad(loss_of(model(x), labels), list(model.parameters()))
    with streamfx.enable(model, **OPTIONS):
        assert type(model(x)) is not Tensor
    layerwise(model)
    logits = model(x)
    assert type(logits) is Tensor and logits.shape == (1, LENGTH, VOCABULARY)
    torch.testing.assert_close(torch.autograd.grad(loss_of(logits, labels), list(model.parameters())), true)
