"""Describe the outcome for a graph in one record, shared by explain, verify, plan, the log line and `TORCH_LOGS="streamfx"`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from torch import fx

from streamfx.budget import format_bytes
from streamfx.cost.categories import loss_values
from streamfx.cost.lengths import sequence_length
from streamfx.cost.memory import Cost, cost_of
from streamfx.errors import describe_error
from streamfx.ir.facts import Facts, known
from streamfx.log import log
from streamfx.tools.report.fallback_reasons import FITS, why_no_stages
from streamfx.tools.report.stage_table import StageReport, stage_reports
from streamfx.tools.report.text import extent, how_many_stream, stage_lines, truncation_text
from streamfx.tools.report.verdict import NOTHING
from streamfx.torch_private import trace_artifact

MORE = "streamfx.explain shows more"
_predicted: WeakKeyDictionary[fx.GraphModule, Cost] = WeakKeyDictionary()


def log_brief(facts: Facts) -> None:
    """Log and trace the record of a graph; called once for each graph."""
    if log.isEnabledFor(logging.INFO):
        log.info("%s", _record_text(facts))
    trace_artifact("streamfx_stages", lambda: _record_text(facts))


def _record_text(facts: Facts) -> str:
    """Return the text. An error while describing a graph must not abort compilation."""
    try:
        return "\n".join(line.rstrip() for line in _record_lines(facts))
    except Exception as error:
        return f"a graph was compiled, but its report failed: {describe_error(error)}"


@dataclass(frozen=True)
class CostedProgram:
    """A program with the data needed to predict its cost: small enough to keep as long as the program lives."""

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    outputs: int
    loss: frozenset[str]

    @property
    def cost(self) -> Cost:
        """The predicted cost, computed once per program."""
        if self.forward not in _predicted:
            _predicted[self.forward] = cost_of(self.forward, self.backward, self.outputs, self.loss)
        return _predicted[self.forward]


def priced(facts: Facts) -> CostedProgram | None:
    """Return the program of a graph for cost prediction, or None if the graph is not chunked."""
    program = facts.program
    return (
        None
        if program is None
        else CostedProgram(program.forward, program.backward, len(facts.joint.outputs), loss_values(facts))
    )


def predicted(facts: Facts) -> Cost:
    """Return the predicted cost of a step through a graph's program."""
    return known(priced(facts)).cost


@dataclass(frozen=True)
class Record:
    """A graph with its stages and the predicted cost of its program; the cost is None if the graph is not chunked."""

    facts: Facts
    stages: tuple[StageReport, ...]
    cost: Cost | None

    @property
    def plain(self) -> list[dict[str, Any]]:
        """The stages as values that JSON can represent."""
        return [stage.as_dict() for stage in self.stages]

    @property
    def streams(self) -> str:
        """A phrase that says how much of the graph streams."""
        if self.cost is None:
            return f"{NOTHING}: {why_no_stages(self.facts)}"
        truncated = sum(len(stage.truncated) for stage in self.stages)
        truncation = truncation_text(next(iter(self.facts.truncations.values())).rows, truncated) if truncated else ""
        return how_many_stream(list(map(extent, self.plain)), self.cost.streamed_share) + truncation

    @property
    def rows(self) -> str:
        """The number of rows per chunk as a phrase; empty if nothing is chunked."""
        rows = sorted({run.rows for stage in self.stages for run in stage.runs})
        if not rows:
            return ""
        return f"{rows[0]:,} rows per chunk" if len(rows) == 1 else f"{rows[0]:,} to {rows[-1]:,} rows per chunk"


def record_of(facts: Facts, graph: int = 0, cost: Cost | None = None) -> Record:
    """Build the record of one graph of a call. `cost` is its predicted cost, if already known."""
    if facts.program is None:
        return Record(facts, tuple(stage_reports(facts, graph, {})), None)
    cost = cost or predicted(facts)
    return Record(facts, tuple(stage_reports(facts, graph, cost.loops)), cost)


def _record_lines(facts: Facts) -> Iterator[str]:
    """Yield the record of a graph: why it does not stream, or rows, peak and stages."""
    record = record_of(facts)
    if record.cost is None:
        yield f"a graph runs unchunked: {why_no_stages(facts)}"
        return
    yield f"a graph of {sequence_length(facts)} rows: {record.streams}"
    yield f"  memory   {format_bytes(record.cost.peak)} at the peak for activations and gradients (predicted)"
    yield from stage_lines(record.plain, record.cost.flops)


# -- the first step


class Compiled:
    """A compiled graph of a training step and its compile time in seconds. Its cost is predicted when the text is first read.

    `facts` is None for a graph far below the memory budget, which is not analyzed.
    """

    def __init__(self, facts: Facts | None, seconds: float) -> None:
        self.facts, self.seconds = facts, seconds

    @cached_property
    def text(self) -> str:
        """The line. An error while describing the graph must not keep the step from running."""
        try:
            outcome = self._outcome()
        except Exception as error:
            outcome = f"its report failed: {describe_error(error)}"
        return f"compiled in {self.seconds:.1f} s: {outcome}"

    def _outcome(self) -> str:
        """Describe how much streams, rows per chunk, and the predicted peak."""
        facts = self.facts
        if facts is None:
            return f"{NOTHING}: {FITS}, and Inductor compiles it; {MORE}"
        record = record_of(facts)
        if record.cost is None:
            return f"{record.streams}; {MORE}"
        more = f" ({MORE})" if any(stage.reasons for stage in record.stages) else ""
        rows = f", {record.rows}" if record.rows else ""
        return f"{record.streams}{more}{rows}, peak predicted {format_bytes(record.cost.peak)} for activations and gradients"


_noted: ContextVar[list[Compiled] | None] = ContextVar("streamfx_noted", default=None)


@contextmanager
def noted_in(compiled_graphs: list[Compiled] | None) -> Iterator[None]:
    """Append training graphs compiled inside the context to a list."""
    token = _noted.set(compiled_graphs)
    try:
        yield
    finally:
        _noted.reset(token)


def note(found: Sequence[Facts], seconds: float, unchunked: bool = False) -> None:
    """Record a compiled Dynamo graph; graphs without gradients are not training steps.

    If Inductor compiled the graph `unchunked` without an analysis, there are no facts for it.
    """
    training: list[Facts | None] = [facts for facts in found if facts.joint.tangents]
    training += [None] if unchunked else []
    if not training:
        return
    compiled, compiled_graphs = Compiled(training[-1], seconds), _noted.get()
    if log.isEnabledFor(logging.INFO):
        log.info("%s", compiled.text)
    if compiled_graphs is not None:
        compiled_graphs.append(compiled)
