"""Few stand for many: turns of a function that takes pieces in turn, chunks of a loop. Their cost is that of following all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamfx.cost.eager_step import EagerStep, eager_step
from streamfx.cost.loop_sampling import FIRST_COUNT, LAST_COUNT, IterationsDifferError, run_iterations
from streamfx.runtime.chunks import Chunks
from streamfx.tools.inspect.eager import checkpointed, eager_cost
from streamfx.tools.planner import baselines
from streamfx.tools.planner.models import built, loss_of
from streamfx.tools.planner.objectives import objective_called
from streamfx.tools.report.verdict import IN_CHUNKS
from streamfx.torch_private import FakeTensorMode
from tests.support.small import EXAMPLES, Causal
from tests.support.spread import only
from tests.test_explain import summary_of

ROWS, WIDTH, VOCABULARY = 8, 16, 50
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 100}
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain(weight: Tensor, hidden: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight).flatten(0, -2).float(), labels.flatten(), reduction="sum")


def step(
    is_sampled: bool, length: int, loss: Loss = plain, is_trained: bool = True, around: Callable[..., Any] = checkpointed
) -> EagerStep:
    """A backbone, and a loss in chunks."""
    with FakeTensorMode():
        weight = torch.empty(WIDTH, VOCABULARY, dtype=torch.bfloat16, requires_grad=is_trained)
        below = torch.empty(WIDTH, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        given, labels = torch.empty(1, length, WIDTH, dtype=torch.bfloat16), torch.empty(1, length, dtype=torch.int64)

        def call() -> Tensor:
            hidden = (given @ below).relu()
            pieces = list(zip(hidden.split(ROWS, 1), labels.split(ROWS, 1), strict=True))
            return torch.stack(run_iterations(around(partial(loss, weight)), pieces)).sum()

        return eager_step(call, is_sampled=is_sampled)


LENGTHS = [FIRST_COUNT * ROWS, (FIRST_COUNT + LAST_COUNT) * ROWS, (FIRST_COUNT + LAST_COUNT + 1) * ROWS, 30 * ROWS, 30 * ROWS + 3]


@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize("length", LENGTHS)
def test_few_turns_stand_for_all(length: int, is_trained: bool) -> None:
    followed = [0, 0]

    def counted(number: int, *given: Tensor) -> Tensor:
        followed[number] += 1
        return plain(*given)

    one, other = (step(bool(few), length, partial(counted, few), is_trained) for few in (1, 0))
    assert one == other and one.cost.backward_curve == other.cost.backward_curve
    turns = -(-length // ROWS)
    assert followed == [
        2 * turns,
        2 * min(turns, FIRST_COUNT + LAST_COUNT + (length % ROWS > 0)),
    ]  # once more in the backward half


def test_what_turns_keep_is_not_stood_for() -> None:
    with pytest.raises(IterationsDifferError, match="allocated or freed during the skipped iteration"):
        step(True, 30 * ROWS, around=lambda function: function)


@pytest.mark.parametrize("message", ["the first iterations differ", "differs from the earlier ones"])
def test_a_turn_that_differs_is_refused(message: str) -> None:
    """One of the first, of which every second is kept, or one behind those that are stood for."""
    held: list[Tensor] = []

    def loss(weight: Tensor, hidden: Tensor, labels: Tensor) -> Tensor:
        found, number = plain(weight, hidden, labels), len(held)
        held.append(hidden if message == "the first iterations differ" and number % 2 == 0 else hidden.new_empty(0))
        return (
            found + hidden.sum()
            if message == "differs from the earlier ones" and number == FIRST_COUNT + LAST_COUNT - 2
            else found
        )

    with pytest.raises(IterationsDifferError, match=message):
        step(True, 30 * ROWS, loss)


class OfTheUsersOwn(nn.Linear):
    """A head of which nothing is known."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@pytest.mark.parametrize("head", only([OfTheUsersOwn], [nn.Linear, OfTheUsersOwn]))
def test_heads_of_torchs_own_alone_are_followed_in_few_turns(head: type[nn.Linear], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def noted(function: Callable[..., Tensor], pieces: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
        asked.append(len(pieces))
        return run_iterations(function, pieces)

    monkeypatch.setattr(baselines, "run_iterations", noted)
    monkeypatch.setattr(baselines, "BUSY", ROWS)
    model = built({"model_type": "llama", **SIZES}, "float32")
    model.lm_head = head(32, 100, bias=False, device="meta")
    chunked, around = baselines.ways_of(model)[IN_CHUNKS]
    found = eager_cost(loss_of(chunked), objective_called("sft", 1).inputs(1, 30 * ROWS), around)
    assert found is not None and bool(asked) is (head is nn.Linear)


def test_where_turns_differ_all_are_followed() -> None:
    calls: list[int] = []

    class Odd(nn.Module):
        """Keeps each second piece as it is."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH, device="meta")])
            self.kept: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack(run_iterations(self.loss, [(piece,) for piece in self.layers[0](x).split(ROWS, 1)])).sum()

        def loss(self, piece: Tensor) -> Tensor:
            calls.append(len(calls))
            self.kept = [*self.kept, piece.clone() if len(self.kept) % 2 else piece]
            return piece.square().sum()

    cost = eager_cost(Odd(), {"x": torch.empty(1, 30 * ROWS, WIDTH, device="meta")}, lambda forward: forward)
    assert cost is not None and len(calls) == FIRST_COUNT + 30  # what is refused when the fourth begins, and all


# -- few chunks


@pytest.mark.compiled
@pytest.mark.parametrize("example", only(["streams"], EXAMPLES))
def test_sampled_chunks_stand_for_all(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures of a loop that runs few chunks are those of one that runs them all."""
    model, arguments = EXAMPLES[example].model(), EXAMPLES[example].arguments()
    sampled = summary_of(model, *arguments, options={"chunk_size": 1})
    monkeypatch.setattr("streamfx.cost.sampling.sample_of", list)
    monkeypatch.setattr("streamfx.cost.sampling.total_over", lambda stretch, costs: sum(costs[i] for i in stretch))
    every = summary_of(model, *arguments, options={"chunk_size": 1})
    assert (sampled["flops"], sampled["peak_bytes"]) == (every["flops"], every["peak_bytes"])


@pytest.mark.compiled
def test_the_number_of_chunks_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten million rows in chunks of four: no chunk is looked at but those that run."""
    looked: list[int] = []
    get = Chunks.__getitem__

    def noted(chunks: Chunks, number: int) -> Any:
        looked.append(number)
        return get(chunks, number)

    monkeypatch.setattr(Chunks, "__getitem__", noted)
    ids: Any = torch.empty(1, 10**7, dtype=torch.int64, device="meta")
    assert summary_of(Causal().to("meta"), ids, ids, options={"chunk_size": 4})["sequence"] == [10**7]
    assert len(looked) < 1000
