"""The result of `streamfx.compare`: a table of the ways of running the same steps."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from streamfx.budget import format_bytes

HEADINGS = ("", "loss", "gradients", "peak memory", "a step", "the first")
LEGEND = "✓ equal up to rounding (largest relative difference from {}); in parentheses: ratio to {}"
RANDOM = "the model draws random numbers (dropout?), which streambp draws for each chunk: set probabilities to 0, or call eval()"


@dataclass(frozen=True)
class MeasuredWay:
    """The figures of one way; without figures, `missing` says why.

    Args:
        name: "eager", "gradient checkpointing", or "streambp".
        missing: why the way has no figures; otherwise "".
        loss: of the last step.
        difference: the largest relative difference of losses and gradients from those of the first way that ran; None for that
            way. The first step is compared, and without an optimizer streambp's last one.
        is_equal: whether the difference is within rounding, for the dtype of the parameters.
        is_random: whether the step drew random numbers.
        peak_bytes: the peak of a step above the level before it.
        step_seconds: the median of the steps after the first, or of those from `compiled_from` on.
        first_seconds: of the first step.
        compiled_from: the first step whose loop bodies another process had compiled; None if there was none.
        eager_seconds: the median of the steps between the first and `compiled_from`; 0 if there are none.
    """

    name: str
    missing: str = ""
    loss: float = 0.0
    difference: float | None = None
    is_equal: bool = True
    is_random: bool = False
    peak_bytes: int = 0
    step_seconds: float = 0.0
    first_seconds: float = 0.0
    compiled_from: int | None = None
    eager_seconds: float = 0.0


def measured_way(name: str, steps: Sequence[Mapping[str, Any]], missing: str) -> MeasuredWay:
    """Return the figures of a way from the events of its steps: memory of the steps after the first, time of those with
    the same code as the last one.
    """
    if missing or not steps:
        return MeasuredWay(name, missing or "no step")
    first, later = steps[0], steps[1:] or steps
    differences = [(step["difference"], step["tolerance"]) for step in steps if step.get("difference") is not None]
    is_last_code = [step["changes"] == steps[-1]["changes"] for step in later]
    last = [step["seconds"] for step, is_last in zip(later, is_last_code, strict=True) if is_last]
    before = [step["seconds"] for step, is_last in zip(later, is_last_code, strict=True) if not is_last]
    return MeasuredWay(
        name,
        loss=steps[-1]["loss"],
        difference=max((difference for difference, _ in differences), default=None),
        is_equal=all(difference <= tolerance for difference, tolerance in differences),
        is_random=first["is_random"],
        peak_bytes=max(step["peak_bytes"] for step in later),
        step_seconds=statistics.median(last),
        first_seconds=first["seconds"],
        compiled_from=len(steps) - len(last) + 1 if steps[-1]["changes"] else None,
        eager_seconds=statistics.median(before) if before else 0.0,
    )


class Comparison:
    """Memory, time, loss, and gradients of eager mode, gradient checkpointing, and streambp: the result of `streamfx.compare`.

    Args:
        ways: the figures of each way.
        steps: the number of steps that each way ran.

    Example:
        >>> from streamfx.tools.report.comparison import Comparison, MeasuredWay
        >>> found = Comparison([MeasuredWay("eager", peak_bytes=4000), MeasuredWay("streambp", is_equal=False)], 2)
        >>> found.ok, found.ways[0].peak_bytes
        (False, 4000)
    """

    def __init__(self, ways: Sequence[MeasuredWay], steps: int) -> None:
        self.ways, self.steps = tuple(ways), steps

    @property
    def ok(self) -> bool:
        """Whether streambp ran, and all differences of losses and gradients are within rounding."""
        return all(way.is_equal for way in self.ways) and not self.ways[-1].missing

    def summary(self) -> dict[str, Any]:
        """Return all figures.

        Returns:
            A dictionary of values that JSON can represent.

        Example:
            >>> from streamfx.tools.report.comparison import Comparison, MeasuredWay
            >>> found = Comparison([MeasuredWay("eager", peak_bytes=4000)], 2)
            >>> max(way["peak_bytes"] for way in found.summary()["ways"])
            4000
        """
        return {"ok": self.ok, "steps": self.steps, "ways": [asdict(way) for way in self.ways]}

    def __str__(self) -> str:
        return "\n".join(line.rstrip() for line in self._lines())

    __repr__ = __str__

    def _lines(self) -> Iterator[str]:
        """Yield the table, what its signs mean, and the gain in a sentence."""
        present = [way for way in self.ways if not way.missing]
        reference = next((way for way in reversed(present[:2]) if way is not self.ways[-1]), None)
        rows = [HEADINGS, *(_cells(way, reference) for way in present)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(HEADINGS))]
        for row in rows:
            yield f"  {row[0]:<{widths[0]}}" + "".join(
                f"   {cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)
            )
        yield from (f"  {way.name}: {way.missing}" for way in self.ways if way.missing)
        if reference is None or reference is present[-1]:
            return
        yield LEGEND.format(present[0].name, reference.name)
        if any(way.is_random for way in present):
            yield RANDOM
        if present[-1] is self.ways[-1]:
            if present[-1].compiled_from is not None:
                yield _change(present[-1])
            yield _gain(present[-1], reference)


def _change(way: MeasuredWay) -> str:
    """Return when compiled loop bodies took over from eager ones."""
    before = f"; a step before took {way.eager_seconds:.1f} s" if way.eager_seconds else ""
    return f"{way.name}: compiled loop bodies run from step {way.compiled_from} on, which {way.name}'s time refers to{before}"


def _gain(streamed: MeasuredWay, reference: MeasuredWay) -> str:
    """Return the gain of streambp in a sentence."""
    memory, seconds = _ratios(streamed, reference)
    ours, theirs = format_bytes(streamed.peak_bytes), format_bytes(reference.peak_bytes)
    return f"streambp: {ours} where {reference.name} takes {theirs} ({memory:.2f} times), in {seconds:.2f} times its time"


def _cells(way: MeasuredWay, reference: MeasuredWay | None) -> tuple[str, ...]:
    """Return the cells of a row."""
    memory, seconds = ("", "") if reference is None else (f" ({ratio:.2f})" for ratio in _ratios(way, reference))
    sign = "✓" if way.is_equal else "✗"
    return (
        way.name,
        f"{way.loss:.6f}",
        "" if way.difference is None else f"{sign} {way.difference:.1e}",
        f"{format_bytes(way.peak_bytes)}{memory}",
        f"{way.step_seconds:.1f} s{seconds}",
        f"{way.first_seconds:.1f} s",
    )


def _ratios(way: MeasuredWay, reference: MeasuredWay) -> tuple[float, float]:
    """Return the memory and the time of a way as ratios to another one's."""
    return way.peak_bytes / max(reference.peak_bytes, 1), way.step_seconds / max(reference.step_seconds, 1e-9)
