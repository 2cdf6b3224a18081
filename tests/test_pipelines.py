"""Parts of a model that are compiled by themselves: stages of a pipeline on two ranks, and blocks."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

import streamfx
from tests.support.engines import loss_of
from tests.support.ranks import on_ranks
from tests.support.sharded import Layer
from tests.support.spread import only

pytestmark = pytest.mark.compiled

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


WAYS: dict[str, Callable[[Stage], Any]] = {
    "the stage": lambda stage: streamfx.enable(stage, **OPTIONS),
    "its layers": lambda stage: stage.layer.compile(backend="streambp", options=OPTIONS),  # as torchtitan compiles blocks
}
V_SHAPED = ([0, 3], [1, 2])  # the first and the last of four


def trained(rank: int, schedule: str, way: str) -> float:
    """The largest error of a gradient in two steps, against one process."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    made, errors = getattr(schedules, schedule), []
    count = 4 if issubclass(made, schedules.PipelineScheduleMulti) else 2
    parts = [Stage(number, count) for number in range(count)]
    truth, own = copy.deepcopy(parts), V_SHAPED[rank] if "ZBV" in schedule else list(range(rank, count, 2))
    for number in own:
        WAYS[way](parts[number])
    stages = [PipelineStage(parts[number], number, count, torch.device("cpu")) for number in own]
    run = made(stages if count == 4 else stages[0], PARTS, loss_fn=loss_of)
    ids, labels = torch.randint(VOCABULARY, (2, PARTS, LENGTH))
    for _ in range(2):
        for part in (*truth, *(parts[number] for number in own)):
            part.zero_grad()
        losses = [loss_of(*part) for part in zip(nn.Sequential(*truth)(ids).chunk(PARTS), labels.chunk(PARTS), strict=True)]
        torch.stack(losses).mean().backward()
        run.step(*((ids,) if 0 in own else ()), **({"target": labels, "losses": []} if count - 1 in own else {}))
        for number in own:
            for mine, theirs in zip(parts[number].parameters(), truth[number].parameters(), strict=True):
                errors.append(float((mine.grad - theirs.grad).abs().max()))  # type: ignore[operator]
    return max(errors)


ZERO_BUBBLE = "ScheduleInterleavedZeroBubble"
CASES = [(ZERO_BUBBLE, "the stage"), ("Schedule1F1B", "the stage"), ("ScheduleZBVZeroBubble", "the stage")]


@pytest.mark.skipif(torch.__version__ < "2.13", reason="2.12 splits no backward graph of torch.compile, with any backend")
@pytest.mark.parametrize(("schedule", "way"), only(CASES[:1], [*CASES, (ZERO_BUBBLE, "its layers")]))
def test_gradients_are_those_of_one_process(schedule: str, way: str) -> None:
    assert max(on_ranks(trained, schedule, way)) < 1e-13


def test_one_node_of_autograd_has_the_gradient_of_the_head() -> None:
    """The compiled backward half had an edge to the head's weight, too. torch's pipelines then put the weights into two groups
    that share this node, and ran it for each: "Trying to backward through the graph a second time".
    """
    stage = Stage(1, 2)
    call = torch.compile(stage, backend="streambp", options=OPTIONS)
    loss = loss_of(call(torch.randn(1, LENGTH, WIDTH, requires_grad=True)), torch.randint(VOCABULARY, (1, LENGTH)))
    known, waiting = set[Any](), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in known:
            known.add(node)
            waiting += [following for following, _ in node.next_functions]
    leaf = stage.get_parameter("head.weight")
    leading = [node for node in known if any(getattr(to, "variable", None) is leaf for to, _ in node.next_functions)]
    assert [type(node).__name__ for node in leading] == ["DeferredOutputBackward"]
