"""The closing table: what a person reads, at most 60 lines. Imports no torch."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

MOST_LINES, MOST_FAILED, WIDTH = 60, 12, 145
FAILED = ("failed", "stopped")
ENDED = ("done", "left out", *FAILED)
UNITS = ("s", "ms", "GiB", "MiB", "TFLOP/s", "GB/s", "%", "tokens")


def closing(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Lines for the figures of each case, for what failed or was left out, and for what is off; details only if they are off."""
    records = list(records)
    cases: dict[tuple[str, str], dict[str, Any]] = {}
    for record in records:
        if "figures" in record and (record.get("off") or not record.get("detail")):
            figures = cases.setdefault((record["check"], record["case"]), {})
            figures.update({**record["figures"], **({"OFF": "see the file"} if record.get("off") else {})})
    lines = ["", "figures", *(line for (check, case), figures in cases.items() for line in _case(check, case, figures))]
    return [*_cut(lines, MOST_LINES - 1 - len(end := _endings(records))), *end]


def _case(check: str, case: str, figures: Mapping[str, Any]) -> list[str]:
    name = f"{check} | {case}: " if case else f"{check}: "
    return textwrap.wrap(name + "; ".join(figure(*item) for item in figures.items()), WIDTH, subsequent_indent="    ")


def figure(name: str, value: Any) -> str:
    """
    >>> figure("peak GiB", 61.23456), figure("launches", 17383), figure("idle %", None), figure("adds in place", True)
    ('peak 61.2 GiB', 'launches 17,383', 'idle -', 'adds in place yes')
    """
    *words, last = name.split(" ")
    unit = f" {last}" if last in UNITS else ""
    label = " ".join(words) if unit else name
    return f"{label} {_text(value)}{unit if value is not None else ''}".strip()


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "-", True: "yes", False: "no"}[value]
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _endings(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """How checks ended: one line for those that are done, one for each that failed, and one for those that were left out."""
    ended = [record for record in records if record.get("status") in ENDED]
    done, failed = ([record for record in ended if record["status"] in kinds] for kinds in (("done",), FAILED))
    left = [record["check"] for record in ended if record["status"] == "left out"]
    lines = [f"{len(done)} checks done in {sum(record['seconds'] for record in done):.0f} s"]
    lines += _cut([f"{record['status']}: {record['check']}: {record['why']}"[:WIDTH] for record in failed], MOST_FAILED)
    return [*lines, *(_cut(textwrap.wrap(f"left out: {'; '.join(left)}", WIDTH), MOST_FAILED) if left else [])]


def _cut(lines: list[str], most: int) -> list[str]:
    if len(lines) <= most:
        return lines
    return [*lines[: most - 1], f"({len(lines) - most + 1} more lines in the file)"]
