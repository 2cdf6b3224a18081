"""What `TORCH_LOGS="streamfx"` says of each graph: stages, sizes of chunks, what runs whole, the predicted peak."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import fx

from streamfx.budget import in_bytes
from streamfx.cost.lengths import sequence_length
from streamfx.cost.memory import Cost, cost_of
from streamfx.cost.terms import loss_values
from streamfx.errors import told
from streamfx.ir.facts import Facts, known
from streamfx.log import log
from streamfx.report.reasons import why_no_stages
from streamfx.report.stages import stage_reports
from streamfx.report.text import how_many_stream, stage_lines
from streamfx.torch_private import trace_artifact

_predicted: WeakKeyDictionary[fx.GraphModule, Cost] = WeakKeyDictionary()


def log_brief(facts: Facts) -> None:
    """Called once for each graph, for the log and for `TORCH_TRACE`."""
    if log.isEnabledFor(logging.INFO):
        log.info("%s", _text(facts))
    trace_artifact("streamfx_stages", lambda: _text(facts))


def _text(facts: Facts) -> str:
    """What cannot be described must not keep a graph from being compiled."""
    try:
        return "\n".join(line.rstrip() for line in _lines(facts))
    except Exception as error:
        return f"a graph was compiled, and cannot be described: {told(error)}"


@dataclass(frozen=True)
class Priced:
    """A program and what is needed to say what a step through it costs: little, so that it may be kept as long as the program."""

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    outputs: int
    loss: frozenset[str]

    @property
    def cost(self) -> Cost:
        """Worked out once for each program, however often it is told."""
        if self.forward not in _predicted:
            _predicted[self.forward] = cost_of(self.forward, self.backward, self.outputs, self.loss)
        return _predicted[self.forward]


def priced(facts: Facts) -> Priced | None:
    """None for a graph that runs as it stands."""
    program = facts.program
    return None if program is None else Priced(program.forward, program.backward, len(facts.joint.outputs), loss_values(facts))


def predicted(facts: Facts) -> Cost:
    """What a step through the program of a graph costs."""
    return known(priced(facts)).cost


def _lines(facts: Facts) -> Iterator[str]:
    if facts.program is None:
        yield f"a graph runs as it stands: {why_no_stages(facts)}"
        return
    cost = predicted(facts)
    stages = [report.as_dict() for report in stage_reports(facts, 0, cost.loops)]
    yield f"a graph of {sequence_length(facts)} rows: {how_many_stream([stage['kind'] for stage in stages], cost.streamed_share)}"
    yield f"  memory   {in_bytes(cost.peak)} at the peak for activations and gradients (predicted)"
    yield from stage_lines(stages, cost.flops)
