"""Ways that take turns on one machine, so that their ratios hold while it is busy with other work."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.processes import Failed, Measured
from benchmarks.settings import MIB, Rows, Settings
from benchmarks.ways import WAYS


@dataclass
class Outcome:
    """What was seen of one way: its first step, the later ones; or why there are none. `held` are parameters and inputs."""

    why_not: str = ""
    held: int = 0
    first: dict[str, float] = field(default_factory=dict)
    later: list[dict[str, float]] = field(default_factory=list)

    def median(self, name: str) -> float:
        return float(statistics.median(step[name] for step in self.later))

    def over(self, other: Outcome, name: str) -> float:
        """The median over the rounds of this way's share of another's: each round compares neighbours in time."""
        shares = [own[name] / its[name] for own, its in zip(self.later, other.later, strict=False)]
        return float(statistics.median(shares))


def compared(found: Mapping[str, Outcome], reference: str, first: Mapping[str, Any]) -> Rows:
    """A row for each way: its peak and its processor time, and the ratios to those of the way `reference`."""
    return [
        {
            **first,
            "way": way,
            "peak MiB": outcome.median("peak_bytes") / MIB,
            f"of {reference}": outcome.over(found[reference], "peak_bytes"),
            "processor s": outcome.median("cpu_seconds"),
            f"of {reference}'s": outcome.over(found[reference], "cpu_seconds"),
            "loss": outcome.later[-1]["loss"],
        }
        if outcome.later
        else {**first, "way": way, "why not": outcome.why_not}
        for way, outcome in found.items()
    ]


def in_turns(specs: Mapping[str, dict[str, Any]], rounds: int, settings: Settings, first: str = "measured") -> dict[str, Outcome]:
    """The outcome of each label's specification (`processes.Measured`'s arguments), and the answer to `first` of its first step.

    On a GPU, where two models may not fit at once and nobody else works, one follows the other.
    """
    outcomes = {label: Outcome(WAYS[spec["way"]].why_not(settings.device)) for label, spec in specs.items()}
    runnable = {label: spec for label, spec in specs.items() if not outcomes[label].why_not}
    groups = [runnable] if settings.device == "cpu" else [{label: spec} for label, spec in runnable.items()]
    for group in groups:
        with contextlib.ExitStack() as stack:
            processes = {label: stack.enter_context(Measured(**spec)) for label, spec in group.items()}
            for number in range(rounds + 1):
                for label, process in processes.items():
                    settings.tell(f"{label}, " + (f"round {number} of {rounds}" if number else "first step"))
                    _take(process, outcomes[label], first)
    return outcomes


def _take(process: Measured, outcome: Outcome, first: str) -> None:
    if outcome.why_not:
        return
    try:
        step = process.ask("measured" if outcome.first else first)
        outcome.held = outcome.held or process.ask("held")["held_bytes"]
    except Failed as failure:
        outcome.why_not = str(failure)
        return
    if outcome.first:
        outcome.later.append(step)
    else:
        outcome.first = step
