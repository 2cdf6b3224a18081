"""Graph breaks of a traced call: where Dynamo stopped tracing, and why."""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from dataclasses import dataclass

from streamfx.tools.report.fallback_reasons import advice_on_break
from streamfx.torch_private.dynamo import cause_of_break


@dataclass(frozen=True)
class GraphBreak:
    """A source line at which Dynamo stopped tracing, with advice. `given_up`: the rest of the function runs in eager mode."""

    reason: str
    where: str
    do: str = ""
    given_up: bool = False


def distinct_breaks(records: Sequence[tuple[str, int, str]]) -> tuple[GraphBreak, ...]:
    """Return each break once: a break in an inlined function is also reported for the calling function."""
    breaks: dict[str, GraphBreak] = {}
    for file, line, text in records:
        where = f"{file}:{line}: {linecache.getline(file, line).strip()}".rstrip(": ")
        reason, hint, given_up = cause_of_break(text)
        breaks.setdefault(where, GraphBreak(reason, where, advice_on_break(reason, hint), given_up))
    return tuple(breaks.values())
