"""Random decoders whose bodies change over from eager to compiled code, between two steps and between the halves of one."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from tests.random_decoders.checking import Failure, executed, small_and_interpreted, sort_of
from tests.random_decoders.specification import Decoder
from tests.support.background import Imitation, imitated
from tests.support.exactness import assert_small, errors, outcome, started

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
            finish_open_step = started(call, model, inputs, reduce)  # eager bodies
            found += [outcome(call, model, inputs, reduce), finish_open_step(), outcome(call, model, inputs, reduce)]
        for step in found:
            assert_small(errors(step, eager), names["tolerance"], f"steps whose bodies change over after {polls} polls")
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
