"""What `TORCH_LOGS="streamfx"` says of each graph: stages, sizes of chunks, what runs whole, the predicted peak."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from weakref import WeakKeyDictionary

from torch import fx

from streamfx.budget import in_bytes
from streamfx.cost.lengths import sequence_length
from streamfx.cost.memory import Cost, cost_of
from streamfx.cost.terms import loss_values
from streamfx.errors import told
from streamfx.ir.facts import Facts
from streamfx.ir.program import Program
from streamfx.log import log
from streamfx.report.reasons import why_no_stages
from streamfx.report.stages import stage_reports
from streamfx.report.text import how_many_stream, stage_lines

_predicted: WeakKeyDictionary[fx.GraphModule, Cost] = WeakKeyDictionary()


def log_brief(facts: Facts) -> None:
    """Called once for each graph; what cannot be described must not keep it from being compiled."""
    if not log.isEnabledFor(logging.INFO):
        return
    try:
        text = "\n".join(line.rstrip() for line in _lines(facts))
    except Exception as error:
        text = f"a graph was compiled, and cannot be described: {told(error)}"
    log.info("%s", text)


def predicted(facts: Facts, program: Program) -> Cost:
    """What a step through a program costs; worked out once for each, however often it is told."""
    if program.forward not in _predicted:
        _predicted[program.forward] = cost_of(program.forward, program.backward, len(facts.joint.outputs), loss_values(facts))
    return _predicted[program.forward]


def _lines(facts: Facts) -> Iterator[str]:
    if facts.program is None:
        yield f"a graph runs as it stands: {why_no_stages(facts)}"
        return
    cost = predicted(facts, facts.program)
    stages = [report.as_dict() for report in stage_reports(facts, 0, cost.loops)]
    yield f"a graph of {sequence_length(facts)} rows: {how_many_stream([stage['kind'] for stage in stages])}"
    yield f"  memory   {in_bytes(cost.peak)} at the peak for activations and gradients (predicted)"
    yield from stage_lines(stages, cost.flops)
