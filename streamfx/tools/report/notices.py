"""What became of a graph: one record, which explain, verify, plan, the logged line and `TORCH_LOGS="streamfx"` tell from."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import fx

from streamfx.budget import in_bytes
from streamfx.cost.categories import loss_values
from streamfx.cost.lengths import sequence_length
from streamfx.cost.memory import Cost, cost_of
from streamfx.errors import told
from streamfx.ir.facts import Facts, known
from streamfx.log import log
from streamfx.tools.report.fallback_reasons import why_no_stages
from streamfx.tools.report.stage_table import StageReport, stage_reports
from streamfx.tools.report.text import extent, how_far_back, how_many_stream, stage_lines
from streamfx.tools.report.verdict import NOTHING
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
class CostedProgram:
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


def priced(facts: Facts) -> CostedProgram | None:
    """None for a graph that runs as it stands."""
    program = facts.program
    return (
        None
        if program is None
        else CostedProgram(program.forward, program.backward, len(facts.joint.outputs), loss_values(facts))
    )


def predicted(facts: Facts) -> Cost:
    """What a step through the program of a graph costs."""
    return known(priced(facts)).cost


@dataclass(frozen=True)
class Record:
    """A graph: its stages, and what a step through its program costs; None where it runs as it stands."""

    facts: Facts
    stages: tuple[StageReport, ...]
    cost: Cost | None

    @property
    def plain(self) -> list[dict[str, Any]]:
        """Its stages in values that JSON knows."""
        return [stage.as_dict() for stage in self.stages]

    @property
    def streams(self) -> str:
        """How much of it streams, in words."""
        if self.cost is None:
            return f"{NOTHING}: {why_no_stages(self.facts)}"
        number = sum(len(stage.truncated) for stage in self.stages)
        back = how_far_back(next(iter(self.facts.truncations.values())).rows, number) if number else ""
        return how_many_stream(list(map(extent, self.plain)), self.cost.streamed_share) + back

    @property
    def rows(self) -> str:
        """Rows per chunk, in words; empty where nothing is cut."""
        rows = sorted({run.rows for stage in self.stages for run in stage.runs})
        return f"{rows[0]:,} rows per chunk" if len(rows) == 1 else f"{rows[0]:,} to {rows[-1]:,} rows per chunk" if rows else ""


def record_of(facts: Facts, graph: int = 0, cost: Cost | None = None) -> Record:
    """Of one graph of a call; `cost` is what a step through its program costs, where that was found out in another way."""
    if facts.program is None:
        return Record(facts, tuple(stage_reports(facts, graph, {})), None)
    cost = cost or predicted(facts)
    return Record(facts, tuple(stage_reports(facts, graph, cost.loops)), cost)


def _lines(facts: Facts) -> Iterator[str]:
    record = record_of(facts)
    if record.cost is None:
        yield f"a graph runs as it stands: {why_no_stages(facts)}"
        return
    yield f"a graph of {sequence_length(facts)} rows: {record.streams}"
    yield f"  memory   {in_bytes(record.cost.peak)} at the peak for activations and gradients (predicted)"
    yield from stage_lines(record.plain, record.cost.flops)
