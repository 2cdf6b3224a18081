"""Describe the outcome of compiling a training step in one line, for the log and for the object `streamfx.enable` returns."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property

from streamfx.budget import format_bytes
from streamfx.errors import describe_error
from streamfx.ir.facts import Facts
from streamfx.log import log
from streamfx.tools.report.fallback_reasons import FITS
from streamfx.tools.report.notices import record_of
from streamfx.tools.report.verdict import NOTHING

MORE = "streamfx.explain shows more"


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
