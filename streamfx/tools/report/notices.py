"""Describe the outcome for a graph in one record, shared by explain, verify, plan, the log line and `TORCH_LOGS="streamfx"`."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from torch import fx

from streamfx.budget import format_bytes
from streamfx.cost.categories import loss_values
from streamfx.cost.flops import flops_of_graph
from streamfx.cost.lengths import sequence_length
from streamfx.cost.memory import Cost, bytes_like, bytes_of_values, cost_of
from streamfx.errors import describe_error
from streamfx.ir.facts import Facts, known
from streamfx.ir.joint import is_parameter, is_tensor
from streamfx.log import log
from streamfx.node_meta import VALUE
from streamfx.options import Options
from streamfx.passes.ops.aliasing import computed_memories
from streamfx.passes.ops.collectives import has_collectives
from streamfx.passes.partition.chunk_sizes import gradient_bytes
from streamfx.tools.report.fallback_reasons import FITS, why_no_stages
from streamfx.tools.report.stage_table import StageReport, source_lines, stage_reports
from streamfx.tools.report.stage_titles import unnumbered
from streamfx.tools.report.text import extent, how_many_stream, stage_lines, truncation_text
from streamfx.tools.report.verdict import NOTHING
from streamfx.torch_private import trace_artifact
from streamfx.torch_private.dropped_writes import dropped_writes
from streamfx.torch_private.versions import untested

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
    if facts.program is None:
        return None
    return CostedProgram(facts.program.forward, facts.program.backward, len(facts.joint.outputs), loss_values(facts))


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
        truncation = truncation_text(next(iter(self.facts.truncations.values())).num_rows, truncated) if truncated else ""
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
    cost = None if facts.program is None else cost or predicted(facts)
    return Record(facts, tuple(stage_reports(facts, graph, {} if cost is None else cost.loops)), cost)


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
    if compiled.facts is not None:
        warn_about_lengths(compiled.facts, seconds)
    if log.isEnabledFor(logging.INFO):
        log.info("%s", compiled.text)
    if compiled_graphs is not None:
        compiled_graphs.append(compiled)


# -- warnings, each logged once: a step with much work saves no memory (because it is not chunked, or because checkpointing takes
#    no more), each length is compiled anew, a write is lost, or this version of PyTorch is untested

MIN_FLOPS = 10**11  # FLOPs of a graph: below this, a missed optimization does not matter
UNCHUNKED = (
    "a graph of {flops:.1e} FLOPs runs unchunked: {why}. The result is exact, and takes as much memory as plain autograd. "
    f"{MORE}."
)
NO_GAIN = (
    "a graph of {flops:.1e} FLOPs streams without saving memory: predicted peak {ours} for activations and gradients, gradient "
    "checkpointing takes about {other}. Gradients or fallbacks take most of it, or the sequence is short: "
    f"{MORE}."
)
LOST_WRITE = (
    "{line}: this write is lost under torch.compile with any backend: AOTAutograd treats a float64 scalar tensor on the CPU as "
    "a Python number. Give it a dimension (torch.zeros(1, dtype=torch.float64)), or another dtype"
)


MAX_LENGTHS = 3  # lengths of a model that are compiled without a warning: two are usual, the first and all others
CHANGING_LENGTHS = (
    "a model was compiled {count} times, in {seconds:.1f} s, for sequences of {lengths} rows. Let all lengths share one graph: "
    "begin with the longest batch, and write dynamic=True (in torch.compile or streamfx.enable), or "
    "torch._dynamo.mark_dynamic(ids, 1) before the call. Or pad batches to a few lengths."
)
_seconds_by_length: dict[Hashable, dict[int, float]] = {}  # compile time of training graphs, by model


def warn_about_lengths(facts: Facts, seconds: float) -> None:
    """Warn if the same model has been compiled for more than `MAX_LENGTHS` lengths, once per model."""
    if (length := sequence_length(facts)) is None:
        return
    found = _seconds_by_length.setdefault(key := _model_key(facts), {})
    found[length] = found.get(length, 0.0) + seconds
    if len(found) > MAX_LENGTHS:
        lengths = ", ".join(f"{length:,}" for length in found)
        text = CHANGING_LENGTHS.format(count=len(found), seconds=sum(found.values()), lengths=lengths)
        _warn_once((CHANGING_LENGTHS, key), text)


def warn_if_torch_untested() -> None:
    """Warn if the tests have never run on this version of PyTorch."""
    if text := untested():
        _warn_once(untested, text)


def warn_about_lost_writes(graph: fx.Graph) -> None:
    """Warn about source lines whose writes AOTAutograd does not write back."""
    for line in dropped_writes(graph):
        _warn_once((LOST_WRITE, line), LOST_WRITE.format(line=line or "a write in place"))


def warn_if_no_gain(facts: Facts, options: Options) -> None:
    """Warn if a training graph with much work saves no memory, once per reason and model, whatever the sequence length.

    Within a memory budget, using more memory is deliberate. Memory on other ranks is not counted, so a graph with collectives
    is reported only if none of it streams. An error while predicting costs must not keep a graph from being compiled.
    """
    if facts.analysis_error:  # already reported
        return
    flops = flops_of_graph(facts.joint.graph)
    if flops < MIN_FLOPS:
        return
    if facts.program is None:
        why = why_no_stages(facts)
        _warn_once((unnumbered(why), _model_key(facts)), UNCHUNKED.format(flops=float(flops), why=why))
    elif options.memory_budget is None and not has_collectives(facts.joint.graph):
        try:
            ours, other = predicted(facts).peak, checkpointing_bytes(facts)
        except Exception as error:
            log.info("it is unknown whether a graph saves memory: %s", describe_error(error))
            return
        if ours >= other:
            _warn_once(
                (NO_GAIN, _model_key(facts)),
                NO_GAIN.format(flops=float(flops), ours=format_bytes(ours), other=format_bytes(other)),
            )


def checkpointing_bytes(facts: Facts) -> int:
    """Estimate the peak bytes, gradients included, if each stage is checkpointed.

    This counts the values between stages, and the values that one stage recomputes for its backward graph plus the largest
    gradient there.
    """
    joint, saved, peak = facts.joint, set[fx.Node](), 0
    gradients = gradient_bytes(joint.gradients)
    for stage in facts.stages:
        recomputed = computed_memories(node for node in stage.forward if any(user not in joint.forward for user in node.users))
        work = max((bytes_like(node.meta[VALUE]) for node in stage.backward if is_tensor(node)), default=0)
        peak = max(peak, bytes_of_values(saved | recomputed) + work)
        saved |= computed_memories(stage.outputs)
    return peak + gradients


_warned: set[Hashable] = set()


def _warn_once(key: Hashable, text: str) -> None:
    """Log a warning unless one with this key was logged before."""
    if key not in _warned:
        _warned.add(key)
        log.warning("%s", text)


def _model_key(facts: Facts) -> Hashable:
    """Return a key that a graph shares with graphs of the same model at other lengths: source lines and weight types."""
    weights = (primal.meta[VALUE] for primal in facts.joint.primals if is_parameter(primal))
    return source_lines(facts.joint.nodes), tuple((value.dtype, tuple(value.shape)) for value in weights)
