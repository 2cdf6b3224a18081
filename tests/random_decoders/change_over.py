"""Random decoders whose bodies change over from eager to compiled code, between two steps and between the halves of one."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from tests.random_decoders.checking import Failure, executed, small_and_interpreted, sort_of
from tests.random_decoders.specification import Decoder
from tests.support.background import Imitation, imitated
from tests.support.exactness import assert_small, errors, fresh, gradient_errors, outcome

POLLS = (1, 2)  # the answers arrive as the n-th step after the jobs were submitted begins


def changes_of(decoder: Decoder) -> int:
    """Run steps before and after bodies change over, and one that is open meanwhile: all must be exact.

    Return how many runs of a graph had compiled bodies; 0 for decoders that are not compared: called in other ways, not in
    float64, or without finite gradients in eager.
    """
    if (decoder.calls, decoder.precision, decoder.adjoints) != ("one", "float64", "exact"):
        return 0
    names = executed(decoder)
    model, inputs, reduce = names["model"], names["inputs"], names["reduce"]
    options = {name: value for name, value in names["options"].items() if name not in ("also", "bodies")}
    eager = outcome(model, model, inputs, reduce)
    if not all(bool(gradient.isfinite().all()) for gradient in eager.gradients.values() if gradient is not None):
        return 0
    changed = 0
    for polls in POLLS:
        torch._dynamo.reset()
        with TemporaryDirectory() as folder, small_and_interpreted(), imitated(Path(folder), Imitation(polls=polls)) as process:
            call = torch.compile(model, backend="streambp", options=options)
            found = [outcome(call, model, inputs, reduce) for _ in range(1 + polls)]
            open_loss = reduce(call(**fresh(inputs)))  # of a step with eager bodies
            found.append(outcome(call, model, inputs, reduce))
            model.zero_grad(set_to_none=True)
            open_loss.backward()
            gradients = {name: None if weight.grad is None else weight.grad.clone() for name, weight in model.named_parameters()}
            found.append(outcome(call, model, inputs, reduce))
        of_open_step = gradient_errors(gradients, {name: eager.gradients[name] for name in gradients})
        for step in (of_open_step, *(errors(one, eager) for one in found)):
            assert_small(step, names["tolerance"], f"steps whose bodies change over after {polls} polls")
        numbers = [number for _, _, number in process.snapshots]
        assert not process.started or numbers[-1] >= 1, "bodies were compiled, and did not change over"
        changed += sum(number >= 1 for number in numbers)
    return changed


def tried(decoder: Decoder) -> int | Failure:
    """The number of runs with compiled bodies, or the failure."""
    try:
        return changes_of(decoder)
    except Exception as error:
        return Failure(decoder, sort_of(error), f"{type(error).__name__}: {error}"[:2000])
