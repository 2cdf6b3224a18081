"""Spans: the rows around a chunk that an operator reads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """Rows [s + low, e + high) for a chunk [s, e); None is unbounded, to the first or the last row."""

    low: int | None = None
    high: int | None = None

    def __str__(self) -> str:
        low = "0" if self.low is None else f"s{self.low:+d}" if self.low else "s"
        high = "T" if self.high is None else f"e{self.high:+d}" if self.high else "e"
        return f"[{low}, {high})"
