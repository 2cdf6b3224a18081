"""What became of a training step, in one line: logged once it is compiled, and shown by what `streamfx.enable` returned."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property

from streamfx.budget import in_bytes
from streamfx.errors import told
from streamfx.ir.facts import Facts
from streamfx.log import log
from streamfx.tools.report.fallback_reasons import FITS
from streamfx.tools.report.notices import record_of
from streamfx.tools.report.verdict import NOTHING

MORE = "streamfx.explain shows more"


class Compiled:
    """A graph of a training step, and the seconds that it took. Its cost is predicted when somebody reads the line.

    `facts` are None for a graph that fits by far, of which nothing was found out.
    """

    def __init__(self, facts: Facts | None, seconds: float) -> None:
        self.facts, self.seconds = facts, seconds

    @cached_property
    def text(self) -> str:
        """The line; what cannot be described must not keep a step from running."""
        try:
            found = self._found()
        except Exception as error:
            found = f"it cannot be described: {told(error)}"
        return f"compiled in {self.seconds:.1f} s: {found}"

    def _found(self) -> str:
        facts = self.facts
        if facts is None:
            return f"{NOTHING}: {FITS}, and Inductor compiles it; {MORE}"
        record = record_of(facts)
        if record.cost is None:
            return f"{record.streams}; {MORE}"
        more = f" ({MORE})" if any(stage.reasons for stage in record.stages) else ""
        rows = f", {record.rows}" if record.rows else ""
        return f"{record.streams}{more}{rows}, peak predicted {in_bytes(record.cost.peak)} for activations and gradients"


_noted: ContextVar[list[Compiled] | None] = ContextVar("streamfx_noted", default=None)


@contextmanager
def noted_in(seen: list[Compiled] | None) -> Iterator[None]:
    """Training graphs that are compiled inside are added to a list."""
    token = _noted.set(seen)
    try:
        yield
    finally:
        _noted.reset(token)


def note(found: Sequence[Facts], seconds: float, whole: bool = False) -> None:
    """Called once for each graph of Dynamo's; graphs without gradients are no step. Of a step that Inductor got `whole` before
    anything was found, there are no facts.
    """
    training: list[Facts | None] = [facts for facts in found if facts.joint.tangents]
    training += [None] if whole else []
    if not training:
        return
    compiled, seen = Compiled(training[-1], seconds), _noted.get()
    if log.isEnabledFor(logging.INFO):
        log.info("%s", compiled.text)
    if seen is not None:
        seen.append(compiled)
