"""Spans: the rows around a chunk that an operator reads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """Rows [s + low, e + high) for a chunk [s, e); None is unbounded, to the first or the last row.

    Causal attention sees keys (None, 0), printed `[0, e)`; a window of 8 keys sees (-7, 0), printed `[s-7, e)`.
    """

    low: int | None = None
    high: int | None = None

    def __str__(self) -> str:
        low = "0" if self.low is None else _shifted("s", self.low)
        high = "T" if self.high is None else _shifted("e", self.high)
        return f"[{low}, {high})"


def _shifted(bound: str, offset: int) -> str:
    """Return the text of a bound plus an offset: `s-7`; an offset of zero is omitted."""
    return f"{bound}{offset:+d}" if offset else bound
