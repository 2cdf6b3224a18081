"""Of a function that takes many pieces in turn few turns are followed: what they stand for is what following all of them says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamfx.cost.eager_step import EagerStep, eager_step
from streamfx.cost.loop_sampling import FIRST, LAST, IterationsDifferError, in_turn
from streamfx.tools.inspect.eager import checkpointed, eager_cost
from streamfx.tools.planner import baselines
from streamfx.tools.planner.models import built, loss_of
from streamfx.tools.planner.objectives import objective_called
from streamfx.tools.report.verdict import IN_CHUNKS
from streamfx.torch_private import FakeTensorMode

ROWS, WIDTH, VOCABULARY = 8, 16, 50
TINY = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 100,
}
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain(weight: Tensor, hidden: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight).flatten(0, -2).float(), labels.flatten(), reduction="sum")


def step(
    of_few: bool, length: int, loss: Loss = plain, is_trained: bool = True, around: Callable[..., Any] = checkpointed
) -> EagerStep:
    """A backbone, and a loss in chunks."""
    with FakeTensorMode():
        weight = torch.empty(WIDTH, VOCABULARY, dtype=torch.bfloat16, requires_grad=is_trained)
        below = torch.empty(WIDTH, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        given, labels = torch.empty(1, length, WIDTH, dtype=torch.bfloat16), torch.empty(1, length, dtype=torch.int64)

        def call() -> Tensor:
            hidden = (given @ below).relu()
            pieces = list(zip(hidden.split(ROWS, 1), labels.split(ROWS, 1), strict=True))
            return torch.stack(in_turn(around(partial(loss, weight)), pieces)).sum()

        return eager_step(call, of_few=of_few)


@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize("length", [FIRST * ROWS, (FIRST + LAST) * ROWS, (FIRST + LAST + 1) * ROWS, 30 * ROWS, 30 * ROWS + 3])
def test_few_turns_stand_for_all(length: int, is_trained: bool) -> None:
    followed = [0, 0]

    def counted(number: int, *given: Tensor) -> Tensor:
        followed[number] += 1
        return plain(*given)

    one, other = (step(bool(few), length, partial(counted, few), is_trained) for few in (1, 0))
    assert one == other and one.cost.backward_curve == other.cost.backward_curve
    turns = -(-length // ROWS)
    assert followed == [2 * turns, 2 * min(turns, FIRST + LAST + (length % ROWS > 0))]  # once more in the backward half


def test_what_turns_keep_is_not_stood_for() -> None:
    with pytest.raises(IterationsDifferError, match="leaves something else behind"):
        step(True, 30 * ROWS, around=lambda function: function)


def test_turns_that_differ_are_refused() -> None:
    held: list[Tensor] = []

    def every_second(weight: Tensor, hidden: Tensor, labels: Tensor) -> Tensor:
        held.append(hidden.clone() if len(held) % 2 else hidden)
        return plain(weight, hidden, labels)

    with pytest.raises(IterationsDifferError, match="the first turns differ"):
        step(True, 30 * ROWS, every_second)


def test_a_turn_behind_those_that_are_stood_for_is_looked_at() -> None:
    turns: list[int] = []

    def keeps_the_last(weight: Tensor, hidden: Tensor, labels: Tensor) -> Tensor:
        turns.append(len(turns))
        found = plain(weight, hidden, labels)
        return found + hidden.sum() if len(turns) == FIRST + LAST - 1 else found

    with pytest.raises(IterationsDifferError, match="is like none before"):
        step(True, 30 * ROWS, keeps_the_last)


class OfTheUsersOwn(nn.Linear):
    """A head of which nothing is known."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@pytest.mark.parametrize("head", [nn.Linear, OfTheUsersOwn])
def test_heads_of_torchs_own_alone_are_followed_in_few_turns(head: type[nn.Linear], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def noted(function: Callable[..., Tensor], pieces: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
        asked.append(len(pieces))
        return in_turn(function, pieces)

    monkeypatch.setattr(baselines, "in_turn", noted)
    monkeypatch.setattr(baselines, "BUSY", ROWS)
    model = built(TINY, "float32")
    model.lm_head = head(32, 100, bias=False, device="meta")
    chunked, around = baselines.ways_of(model)[IN_CHUNKS]
    found = eager_cost(loss_of(chunked), objective_called("sft", 1).inputs(1, 30 * ROWS), around)
    assert found is not None and bool(asked) is (head is nn.Linear)


def test_where_turns_differ_all_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH, device="meta")])
            self.kept: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.layers[0](x)
            return torch.stack(in_turn(self.loss, [(piece,) for piece in hidden.split(ROWS, 1)])).sum()

        def loss(self, piece: Tensor) -> Tensor:
            calls.append(len(calls))
            self.kept = [*self.kept, piece.clone() if len(self.kept) % 2 else piece]
            return piece.square().sum()

    cost = eager_cost(Odd(), {"x": torch.empty(1, 30 * ROWS, WIDTH, device="meta")}, lambda forward: forward)
    assert cost is not None and len(calls) == FIRST + 30  # what is refused when the fourth begins, and all
