"""Promise one and two, for training objectives: each is traced as a user wrote it, streams with exact gradients, and makes no
tensor of rows times vocabulary. `tests/support/objectives` has them.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from streamfx import explain
from tests.support.exactness import TOLERANCE, assert_small, check_streamed, errors, outcome, recorder
from tests.support.objectives import OBJECTIVES, Step, batch_of
from tests.support.objectives.models import ROWS, VOCABULARY
from tests.support.spread import only
from tests.test_live_bytes import Shapes

OF_HIDDEN_STATES = {"ppo_with_values", "reward_of_pairs", "scores_then_last", "last_token_classes", "process_rewards"}
OUTSIDE = [name for name in OBJECTIVES if name not in OF_HIDDEN_STATES | {"hidden_states_too"}]
OF_TWO_MODELS = ("kl", "teacher_and_labels", "dpo", "dpo_two_calls", "grpo", "jensen_shannon")
CASES = [*((name, 1) for name in OBJECTIVES), *((name, 2) for name in OF_TWO_MODELS)]


def of_all_rows(shapes: set[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Shapes of at least half of the batch's rows times the vocabulary: a chunk has fewer."""
    return sorted(shape for shape in shapes if VOCABULARY in shape and torch.Size(shape).numel() >= 2 * (ROWS - 1) * VOCABULARY)


@pytest.mark.parametrize(("name", "layers"), only([("dpo_reference_given", 1)], CASES))
def test_inside_of_the_compiled_function(name: str, layers: int) -> None:
    """Nothing large of the first model waits while the layers of a second one run, either."""
    step, batch = Step(OBJECTIVES[name], layers), batch_of()
    truth = outcome(step, step, batch)
    backend = recorder(chunk_size=5, loss_chunk_size=5)
    compiled = torch.compile(step, backend=backend)
    assert_small(errors(outcome(compiled, step, batch), truth), TOLERANCE, name)
    assert len(backend.compilations) == 1
    check_streamed(backend.facts, True, {"causal"})
    with Shapes() as shapes:
        compiled(**batch).backward()
    assert shapes.made, "nothing was seen"
    assert not of_all_rows(shapes.made), "made in one piece"
    with Shapes() as shapes:
        step(**batch).backward()
    assert name in OF_HIDDEN_STATES or of_all_rows(shapes.made), "eager makes it: the check can fail"


@pytest.mark.long
def test_outside_on_lazily_returned_logits() -> None:
    """The model is compiled, losses follow it: exact in any case. One compilation serves all."""
    step, batch = Step(OBJECTIVES["kl"]), batch_of()
    for name in OUTSIDE:
        step.objective = OBJECTIVES[name]
        step.models.policy._compiled_call_impl = None
        truth = outcome(step, step, batch)
        step.models.policy.compile(backend="streambp", options={"chunk_size": 5})
        assert_small(errors(outcome(step, step, batch), truth), TOLERANCE, name)


@pytest.mark.long
@pytest.mark.parametrize("name", ["dpo", "grpo_entropy_bonus", "kl", "scores_then_last"])
def test_explain_finds_nothing_that_runs_whole(name: str) -> None:
    summary = explain(Step(OBJECTIVES[name]), **batch_of(), options={"chunk_size": 5}).summary(with_baseline=False)
    assert summary["streamed_flops_share"] == 1
    assert summary["graph_breaks"] == 0
    assert not [reason for stage in summary["stages"] for reason in stage["reasons"]]


@pytest.mark.long
def test_a_token_that_is_not_there() -> None:
    """Eager raises an IndexError: a number that is out of range must not become a loss."""
    step, batch = Step(OBJECTIVES["reward_of_pairs"]), batch_of()
    compiled = torch.compile(step, backend=recorder(chunk_size=5))
    assert compiled(**batch).isfinite()
    assert compiled(**{**batch, "last": batch["last"] - ROWS}).isfinite()
    with pytest.raises(RuntimeError, match="index out of bounds"):
        compiled(**{**batch, "last": batch["last"] + ROWS})
