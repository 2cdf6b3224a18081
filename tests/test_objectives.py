"""Training objectives stream with exact gradients and without a tensor of rows times vocabulary (`support/objectives.py`)."""

import pytest
import torch

pytest.importorskip("transformers")

from tests.support.exactness import TOLERANCE, assert_small, check_streamed, errors, outcome, recorder
from tests.support.objectives import OBJECTIVES, OF_HIDDEN, ROWS, VOCABULARY, Step, batch_of
from tests.support.spread import only
from tests.test_live_bytes import Shapes

pytestmark = pytest.mark.compiled

OF_TWO_MODELS = ("dpo", "grpo", "jensen_shannon")
CASES = [*((name, 1) for name in OBJECTIVES), *((name, 2) for name in OF_TWO_MODELS)]


def of_all_rows(shapes: set[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Shapes of at least half of the batch's rows times the vocabulary: a chunk has fewer."""
    return sorted(shape for shape in shapes if VOCABULARY in shape and torch.Size(shape).numel() >= 2 * (ROWS - 1) * VOCABULARY)


@pytest.mark.parametrize(("name", "layers"), only([("dpo_reference_given", 1)], CASES))
def test_objectives_stream_without_large_tensors(name: str, layers: int) -> None:
    """Also in objectives of two models."""
    step, batch = Step(OBJECTIVES[name], layers), batch_of()
    truth = outcome(step, step, batch)
    backend = recorder(chunk_size=5, loss_chunk_size=5)
    compiled = torch.compile(step, backend=backend)
    assert_small(errors(outcome(compiled, step, batch), truth), TOLERANCE, name)
    assert len(backend.compilations) == 1
    check_streamed(backend.facts, True, {"causal"})
    found = []
    for run in (compiled, step):
        with Shapes() as shapes:
            run(**batch).backward()
        assert shapes.made, "nothing was seen"
        found.append(of_all_rows(shapes.made))
    assert not found[0], "a tensor of rows times vocabulary"
    assert name in OF_HIDDEN or found[1], "eager has none: the check cannot fail"


@pytest.mark.long
def test_an_index_out_of_range_is_an_error() -> None:
    """As in eager, it must not become a loss."""
    step, batch = Step(OBJECTIVES["reward_of_pairs"]), batch_of()
    compiled = torch.compile(step, backend=recorder(chunk_size=5))
    assert compiled(**batch).isfinite()
    assert compiled(**{**batch, "last": batch["last"] - ROWS}).isfinite()
    with pytest.raises(RuntimeError, match="index out of bounds"):
        compiled(**{**batch, "last": batch["last"] + ROWS})
