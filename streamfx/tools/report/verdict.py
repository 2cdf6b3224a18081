"""Compare the memory and FLOPs of a streamed step with its baselines in one sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamfx.budget import format_bytes

MIN_GAIN = 1.1  # times less memory: a smaller gain is not worth a code change
MIN_DIFFERENCE = 1.02  # ratio below which two figures count as equal
CHECKPOINTING, EAGER = "gradient checkpointing", "eager"
NOTHING = "nothing streams"
IN_CHUNKS = "with the loss in chunks"
CHUNKED = f"{CHECKPOINTING} {IN_CHUNKS}"  # never materializes the logits for all rows


@dataclass(frozen=True)
class StepCost:
    """The cost of one way of running a step; compared steps count the same bytes. FLOPs may be unknown."""

    way: str
    peak_bytes: int
    flops: int | None = None


def verdict(
    ours: StepCost,
    others: Sequence[StepCost],
    why_unchunked: str | None = None,
    gains_from: int | None = None,
    counted: str = "memory",
) -> str:
    """Compare a step with its baselines in one sentence.

    The sentence gives the memory and FLOPs relative to the first of `others`, and the memory relative to checkpointing with a
    chunked loss if `others` include it. It depends on the arguments alone.

    Args:
        ours: Cost of the streamed step.
        others: Costs of the baselines.
        why_unchunked: The reason if nothing streams, else None.
        gains_from: A length from which on there is a gain; None if unknown.
        counted: The memory that the figures count.

    >>> checkpointing = StepCost("gradient checkpointing", 42 << 30, 100)
    >>> verdict(StepCost("streambp", 10 << 30, 92), [checkpointing])
    '4.2 times less memory than gradient checkpointing, 0.92 of its FLOPs'
    >>> verdict(StepCost("streambp", 10 << 30, 92), [checkpointing, StepCost(CHUNKED, 15 << 30)])
    '4.2 times less memory than gradient checkpointing (1.5 times with the loss in chunks), 0.92 of its FLOPs'
    >>> verdict(StepCost("streambp", 42 << 30), [checkpointing], gains_from=2100)
    'no gain over gradient checkpointing at this length; from about 2,100 tokens on'
    >>> verdict(StepCost("streambp", 40 << 30, 75), [checkpointing])
    'little gain over gradient checkpointing at this length: 0.95 of its memory, 0.75 of its FLOPs'
    >>> verdict(StepCost("streambp", 84 << 30), [checkpointing])
    '2.0 times as much memory as gradient checkpointing at this length'
    >>> verdict(StepCost("streambp", 21 << 30), [checkpointing], "no rule")
    '2.0 times less memory than gradient checkpointing, though nothing streams, because no rule'
    >>> verdict(StepCost("streambp", 42 << 30), [checkpointing], "no rule")
    'no gain: nothing streams, because no rule'
    >>> verdict(StepCost("streambp", 1 << 30), [])
    'without a baseline: none was traced'
    """
    if not others:
        return f"{NOTHING}, because {why_unchunked}" if why_unchunked is not None else "without a baseline: none was traced"
    other = others[0]
    saving, excess = ratio(other.peak_bytes, ours.peak_bytes), ratio(ours.peak_bytes, other.peak_bytes)
    if saving >= MIN_GAIN:
        though = "" if why_unchunked is None else f", though {NOTHING}, because {why_unchunked}"
        chunked = next(
            (f" ({times(ratio(one.peak_bytes, ours.peak_bytes))} {IN_CHUNKS})" for one in others if one.way == CHUNKED), ""
        )
        share = f", {ours.flops / other.flops:.2f} of its FLOPs" if ours.flops and other.flops else ""
        return f"{times(saving)} less {counted} than {other.way}{chunked}{share}{though}"
    if why_unchunked is not None and saving < MIN_DIFFERENCE:
        text = "no gain" if excess < MIN_GAIN else f"{times(excess)} as much {counted} as {other.way}"
        return f"{text}: {NOTHING}, because {why_unchunked}"
    if excess >= MIN_GAIN:
        text = f"{times(excess)} as much {counted} as {other.way} at this length"
    else:
        text = (
            f"{'little' if saving >= MIN_DIFFERENCE else 'no'} gain over {other.way} at this length{_savings_text(ours, other)}"
        )
    from_length = "" if gains_from is None else f"; from about {gains_from:,} tokens on"
    return f"{text}{'' if why_unchunked is None else f'; {NOTHING}, because {why_unchunked}'}{from_length}"


def verdict_within(
    budget: int, budget_text: str, ours: StepCost, others: Sequence[StepCost], why_unchunked: str | None = None
) -> str:
    """Compare a step that fits into a memory budget with its baselines: whether they fit, and the FLOPs.

    >>> ours, checkpointing = StepCost("streambp", 78 << 30, 78), StepCost("gradient checkpointing", 131 << 30, 100)
    >>> verdict_within(80 << 30, '80.0 GiB', ours, [checkpointing])
    'fits into 80.0 GiB; gradient checkpointing takes 131.0 GiB'
    >>> verdict_within(160 << 30, '160.0 GiB', ours, [checkpointing])
    'fits into 160.0 GiB with 0.78 of the FLOPs of gradient checkpointing, which fits, too'
    """
    fits = f"fits into {budget_text}"
    fits += "" if why_unchunked is None else f": {NOTHING}, because {why_unchunked}"
    if not others:
        return fits
    other = others[0]
    if other.peak_bytes > budget:
        return f"{fits}; {other.way} takes {format_bytes(other.peak_bytes)}"
    if why_unchunked is not None or not ours.flops or not other.flops:
        return f"{fits}{';' if why_unchunked else ','} {f'{other.way} fits, too' if why_unchunked else f'as does {other.way}'}"
    return f"{fits} with {ours.flops / other.flops:.2f} of the FLOPs of {other.way}, which fits, too"


def length_verdict(ours: int, others: Mapping[str, int]) -> str:
    """Compare the longest sequence lengths of the backend and of the first of `others`; 0 means that no length fits.

    >>> length_verdict(559_104, {"gradient checkpointing": 65_536, "the same, loss in chunks": 131_072})
    '8.5 times the length of gradient checkpointing: 559,104 tokens for 65,536'
    >>> length_verdict(512, {"gradient checkpointing": 0}), length_verdict(512, {})
    ('512 tokens fit; gradient checkpointing fits at no length', '512 tokens fit, without a baseline')
    """
    for way, length in others.items():
        if not length:
            return f"{ours:,} tokens fit; {way} fits at no length"
        return f"{times(ratio(ours, length))} the length of {way}: {ours:,} tokens for {length:,}"
    return f"{ours:,} tokens fit, without a baseline"


def why_nothing_streams(stages: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the first reason in the stages of a report if no stage has a loop; None otherwise.

    >>> why_nothing_streams([{"loops": 0, "reasons": ["no rule"]}])
    'no rule'
    """
    if any(stage["loops"] for stage in stages):
        return None
    return next((reason for stage in stages for reason in stage["reasons"]), "nothing is computed along a sequence")


def gains(ours: StepCost, others: Sequence[StepCost]) -> bool:
    """Return whether the verdict reports a memory saving."""
    return bool(others) and ratio(others[0].peak_bytes, ours.peak_bytes) >= MIN_GAIN


def ratio(part: int, whole: int) -> float:
    """Return a quotient, or 1 if the divisor is 0."""
    return part / whole if whole else 1.0


def times(factor: float) -> str:
    """Format a ratio.

    >>> times(4.23), times(12.3), times(250.4)
    ('4.2 times', '12 times', '250 times')
    """
    return f"{factor:.1f} times" if factor < 10 else f"{factor:,.0f} times"


def _savings_text(ours: StepCost, other: StepCost) -> str:
    """Format the memory and FLOPs that are lower than the baseline's although the memory gain is small."""
    memory = ratio(ours.peak_bytes, other.peak_bytes)
    savings = [f"{memory:.2f} of its memory"] if ratio(other.peak_bytes, ours.peak_bytes) >= MIN_DIFFERENCE else []
    if ours.flops and other.flops and other.flops >= MIN_GAIN * ours.flops:
        savings.append(f"{ours.flops / other.flops:.2f} of its FLOPs")
    return f": {', '.join(savings)}" if savings else ""
