"""Costs of few iterations, or few chunks of a loop, predict the cost of all."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamfx.cost import loop_sampling
from streamfx.cost.eager_step import EagerStep, eager_step
from streamfx.cost.loop_sampling import NUM_FIRST, NUM_LAST, run_iterations
from streamfx.runtime.chunks import Chunks
from streamfx.tools.inspect.eager import checkpointed, eager_cost
from streamfx.tools.planner import baselines
from streamfx.tools.planner.models import build_model, loss_of
from streamfx.tools.planner.objectives import objective_by_name
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


def step(length: int, loss: Loss, is_trained: bool) -> EagerStep:
    """A backbone, and a loss in chunks."""
    with FakeTensorMode():
        weight = torch.empty(WIDTH, VOCABULARY, dtype=torch.bfloat16, requires_grad=is_trained)
        below = torch.empty(WIDTH, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        given, labels = torch.empty(1, length, WIDTH, dtype=torch.bfloat16), torch.empty(1, length, dtype=torch.int64)

        def call() -> Tensor:
            hidden = (given @ below).relu()
            pieces = list(zip(hidden.split(ROWS, 1), labels.split(ROWS, 1), strict=True))
            return torch.stack(run_iterations(checkpointed(partial(loss, weight)), pieces)).sum()

        return eager_step(call)


SAMPLED = NUM_FIRST + NUM_LAST


@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize("length", [NUM_FIRST * ROWS, SAMPLED * ROWS, (SAMPLED + 1) * ROWS, 30 * ROWS, 30 * ROWS + 3])
def test_sampled_iterations_cost_the_same_as_all(length: int, is_trained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [0, 0]

    def counted(number: int, *given: Tensor) -> Tensor:
        calls[number] += 1
        return plain(*given)

    one = step(length, partial(counted, 1), is_trained)
    monkeypatch.setattr(loop_sampling, "NUM_FIRST", length)
    other = step(length, partial(counted, 0), is_trained)
    assert one == other and one.cost.backward_curve == other.cost.backward_curve
    iterations = -(-length // ROWS)
    assert calls == [2 * iterations, 2 * min(iterations, SAMPLED + (length % ROWS > 0))]  # the backward half recomputes


class CustomHead(nn.Linear):
    """A head that may do anything."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@pytest.mark.parametrize("head", only([CustomHead], [nn.Linear, CustomHead]))
def test_only_heads_of_torch_are_sampled(head: type[nn.Linear], monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []

    def noted(function: Callable[..., Tensor], pieces: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
        counts.append(len(pieces))
        return run_iterations(function, pieces)

    monkeypatch.setattr(baselines, "run_iterations", noted)
    monkeypatch.setattr(baselines, "EFFICIENT_TOKENS", ROWS)
    model = build_model({"model_type": "llama", **SIZES}, "float32")
    model.lm_head = head(32, 100, bias=False, device="meta")
    chunked, around = baselines.baselines_of(model)[IN_CHUNKS]
    found = eager_cost(loss_of(chunked), objective_by_name("sft", 1).inputs(1, 30 * ROWS), around)
    assert found is not None and bool(counts) is (head is nn.Linear)


# -- few chunks


@pytest.mark.compiled
@pytest.mark.parametrize("example", only(["streams"], EXAMPLES))
def test_sampled_chunks_cost_the_same_as_all(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, arguments = EXAMPLES[example].model(), EXAMPLES[example].arguments()
    sampled = summary_of(model, *arguments, options={"chunk_size": 1})
    monkeypatch.setattr("streamfx.cost.sampling.sample_of", list)
    monkeypatch.setattr("streamfx.cost.sampling.total_over", lambda part, segment, costs: sum(costs[i] for i in part))
    every = summary_of(model, *arguments, options={"chunk_size": 1})
    assert (sampled["flops"], sampled["peak_bytes"]) == (every["flops"], every["peak_bytes"])


@pytest.mark.compiled
def test_explain_reads_few_of_many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten million rows in chunks of four."""
    looked: list[int] = []
    get = Chunks.__getitem__

    def noted(chunks: Chunks, number: int) -> Any:
        looked.append(number)
        return get(chunks, number)

    monkeypatch.setattr(Chunks, "__getitem__", noted)
    ids: Any = torch.empty(1, 10**7, dtype=torch.int64, device="meta")
    assert summary_of(Causal().to("meta"), ids, ids, options={"chunk_size": 4})["sequence"] == [10**7]
    assert len(looked) < 1000
