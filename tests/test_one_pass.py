"""A gradient that is a multiple of a number, or of a number per sequence, is found along with the loss; any other is not."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("transformers")

from streamfx.errors import OverBudgetError
from tests.support.counting import Counting
from tests.support.exactness import Recorder, assert_small, check_streamed, errors, outcome, recorder
from tests.support.objectives import OBJECTIVES, Step, batch_of
from tests.support.objectives.models import VOCABULARY
from tests.support.spread import only
from tests.test_precision import distance

TOLERANCE = 1e-12
QUICK = ("dpo_with_sft", "grpo_reference_given")
FROZEN = ("lm_head", "embed_tokens", "model.norm")  # as adapters leave them


class HeadProducts(Counting):
    """FLOPs of products with the vocabulary, in products of all rows."""

    def flops_of(self, func: Any, args: Any, result: Any) -> int:
        if func not in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            return 0
        one, other = args[-2:]
        return 2 * one.shape[0] * one.shape[1] * other.shape[1] if VOCABULARY in (*one.shape, *other.shape) else 0


def head_products(step: Any, batch: dict[str, Tensor]) -> int:
    with HeadProducts() as counted:
        step(**batch).backward()
    return counted.flops


def frozen(step: Step) -> Step:
    for name, parameter in step.models.policy.named_parameters():
        parameter.requires_grad_(not any(part in name for part in FROZEN))
    return step


# Objectives whose gradient is no multiple of one number per sequence: of two, of ratios that all tokens share.
IN_TWO_PASSES = {"dpo_with_sft", "gspo_per_token"}
OF_OTHER_HEADS = {"reward_of_pairs", "scores_then_last", "last_token_classes", "process_rewards"}


def compiled(step: Step) -> tuple[Any, Recorder]:
    backend = recorder(chunk_size=5, loss_chunk_size=5)
    return torch.compile(step, backend=backend), backend


def check(step: Step, batch: dict[str, Tensor], name: str) -> Recorder:
    truth = outcome(step, step, batch)
    own, backend = compiled(step)
    assert_small(errors(outcome(own, step, batch), truth), TOLERANCE, name)
    check_streamed(backend.facts, True, {"causal"})
    return backend


@pytest.mark.parametrize("name", only(QUICK, OBJECTIVES))
def test_objectives_with_a_frozen_head(name: str) -> None:
    """The head's products are those of eager, which holds the logits: none is made twice."""
    step, batch = frozen(Step(OBJECTIVES[name])), batch_of()
    check(step, batch, name)
    if name not in OF_OTHER_HEADS:
        is_once = head_products(compiled(step)[0], batch) == head_products(step, batch)
        assert is_once == (name not in IN_TWO_PASSES)


@pytest.mark.parametrize("name", only(["dpo"], ["dpo", "ipo", "orpo", "kto"]))
def test_a_trained_head_runs_in_two_passes(name: str) -> None:
    step, batch = Step(OBJECTIVES[name]), batch_of()
    backend = check(step, batch, name)
    assert not backend.facts[-1].stages[-1].gradient_in_forward


def preferences(x: Tensor, head: Tensor, ids: Tensor, halves: bool = True) -> Tensor:
    sums = (
        (x @ head).to(torch.promote_types(x.dtype, torch.float32)).log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1).sum(1)
    )
    if not halves:
        return (0.1 * sums).exp().mean()
    chosen, rejected = sums.chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


class Small(nn.Module):
    """A frozen head behind one layer of attention."""

    halves = True

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 8, dtype=torch.float64)
        self.out = nn.Linear(8, 8, bias=False, dtype=torch.float64)
        self.head = nn.Parameter(torch.randn(8, 11, dtype=torch.float64), requires_grad=False)

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        heads = x[:, None]
        return x + self.out(F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)[:, 0])

    def forward(self, ids: Tensor) -> Tensor:
        return preferences(self.hidden(ids), self.head, ids, self.halves)


class OnlyHead(nn.Module):
    """A head and its loss compiled alone: hidden states get a gradient."""

    def forward(self, x: Tensor, head: Tensor, ids: Tensor) -> Tensor:
        return preferences(x, head, ids)


def some_ids(seed: int = 1, batch: int = 4, rows: int = 13) -> Tensor:
    return torch.randint(0, 11, (batch, rows), generator=torch.Generator().manual_seed(seed))


def same_gradients(own: nn.Module, eager: nn.Module) -> None:
    for name, parameter in own.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, eager.get_parameter(name).grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("retained", [0, 1, 2])
def test_runs_that_keep_the_graph(retained: int) -> None:
    own = Small()
    eager = deepcopy(own)
    for call in (torch.compile(own, backend=recorder(chunk_size=4)), eager):
        loss = 3 * call(some_ids())
        for _ in range(retained):
            loss.backward(retain_graph=True)
        loss.backward()
    same_gradients(own, eager)


def test_calls_that_overlap_or_have_no_backward() -> None:
    own = Small()
    eager = deepcopy(own)
    for call in (torch.compile(own, backend=recorder(chunk_size=4)), eager):
        first, second, _ = call(some_ids(1)), call(some_ids(2)), call(some_ids(3))
        (0.5 * first).backward()
        second.backward()
        with torch.no_grad():
            assert torch.isfinite(call(some_ids(4)))
    same_gradients(own, eager)


@pytest.mark.parametrize("retained", [0, 2])
def test_a_head_alone(retained: int) -> None:
    x, head = Small().hidden(some_ids()).detach(), Small().head
    found = []
    backend = recorder(chunk_size=4, loss_chunk_size=4)
    for call in (torch.compile(OnlyHead(), backend=backend), OnlyHead()):
        given = x.clone().requires_grad_()
        loss = 2 * call(given, head, some_ids())
        for _ in range(retained):
            loss.backward(retain_graph=True)
        loss.backward()
        found.append(given.grad)
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-14)


def test_lengths_that_change() -> None:
    own = Small()
    eager = deepcopy(own)
    backend = recorder(chunk_size=4)
    call = torch.compile(own, backend=backend)
    for rows in (13, 9, 4, 17):
        for function in (call, eager):
            function(some_ids(rows=rows)).backward()
    same_gradients(own, eager)
    assert len(backend.facts) == 2
    assert all(facts.stages[-1].gradient_in_forward for facts in backend.facts)


def test_numbers_of_sequences_that_change() -> None:
    own = Small()
    own.halves = False
    eager = deepcopy(own)
    backend = recorder(chunk_size=4)
    call = torch.compile(own, backend=backend, dynamic=True)
    for batch, rows in ((4, 13), (6, 9), (8, 8), (2, 17)):
        for function in (call, eager):
            function(some_ids(batch=batch, rows=rows)).backward()
    same_gradients(own, eager)
    assert all(facts.stages[-1].gradient_in_forward for facts in backend.facts)


@pytest.mark.parametrize(("dtype", "is_moved"), [(torch.bfloat16, True), (torch.float16, False)])
def test_low_precision(dtype: torch.dtype, is_moved: bool) -> None:
    """In bfloat16 gradients are as near to the truth as eager's, on average; in float16 those for ones might vanish."""
    own_distance, eager_distance = 0.0, 0.0
    for seed in range(4):
        low = Small().to(dtype)
        wide, eager = deepcopy(low).double(), deepcopy(low)
        backend = recorder(chunk_size=32, loss_chunk_size=32)
        call = torch.compile(low, backend=backend)
        for function in (call, wide, eager):
            function(some_ids(seed, rows=64)).backward()
        assert backend.facts[-1].stages[-1].gradient_in_forward == is_moved
        truth = {name: parameter.grad for name, parameter in wide.named_parameters()}
        own_distance += distance({name: parameter.grad for name, parameter in low.named_parameters()}, truth)
        eager_distance += distance({name: parameter.grad for name, parameter in eager.named_parameters()}, truth)
    assert own_distance <= 1.1 * eager_distance


def test_the_smallest_plan_that_is_named_is_taken() -> None:
    """With a last stage of its own for the head or without one, whichever fits."""
    own = Small()
    eager = deepcopy(own)
    given = some_ids(rows=256)
    with pytest.raises(OverBudgetError) as found:
        torch.compile(own, backend=recorder(memory_budget=1))(given)
    torch._dynamo.reset()
    budget = int(found.value.smallest * 1.01)
    for call in (torch.compile(own, backend=recorder(memory_budget=budget)), eager):
        call(given).backward()
    same_gradients(own, eager)
