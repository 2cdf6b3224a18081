"""Does it pay? Bytes and FLOPs of a step, ours and another's, as one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

GAIN = 1.1  # times less memory; with less than that nobody would change a line of code
CHECKPOINTING, EAGER = "gradient checkpointing", "eager"


@dataclass(frozen=True)
class Taken:
    """What a step takes by one way of running it; both steps of a comparison count the same bytes. FLOPs may be unknown."""

    way: str
    peak_bytes: int
    flops: int | None = None


def verdict(ours: Taken, others: Sequence[Taken], why_whole: str | None = None, gains_from: int | None = None) -> str:
    """One sentence: how much less memory a step takes than the first of `others`, and how many of its FLOPs.

    `why_whole` says why nothing streams, where nothing does. `gains_from` is a length at which there is a gain, None where nobody
    knows one.

    >>> checkpointing = Taken("gradient checkpointing", 42 << 30, 100)
    >>> verdict(Taken("streambp", 10 << 30, 92), [checkpointing])
    '4.2 times less memory than gradient checkpointing, 0.92 of its FLOPs'
    >>> verdict(Taken("streambp", 41 << 30), [checkpointing], gains_from=2100)
    'no gain over gradient checkpointing at this length; from 2,100 tokens on'
    >>> verdict(Taken("streambp", 84 << 30), [checkpointing])
    '2.0 times as much memory as gradient checkpointing at this length'
    >>> verdict(Taken("streambp", 1 << 30), [])
    'compared with nothing: no other way was followed'
    """
    if why_whole is not None:
        return f"no gain: nothing streams, because {why_whole}"
    if not others:
        return "compared with nothing: no other way was followed"
    other = others[0]
    less = ratio(other.peak_bytes, ours.peak_bytes)
    if less >= GAIN:
        return f"{times(less)} less memory than {other.way}{_flops(ours, other)}"
    more = ratio(ours.peak_bytes, other.peak_bytes)
    found = f"{times(more)} as much memory as" if more >= GAIN else "no gain over"
    later = "" if gains_from is None else f"; from {gains_from:,} tokens on"
    return f"{found} {other.way} at this length{later}"


def gains(ours: Taken, others: Sequence[Taken]) -> bool:
    """Whether a verdict says that memory is saved."""
    return bool(others) and ratio(others[0].peak_bytes, ours.peak_bytes) >= GAIN


def ratio(part: int, whole: int) -> float:
    return part / whole if whole else 1.0


def times(factor: float) -> str:
    """
    >>> times(4.23), times(12.3), times(250.4)
    ('4.2 times', '12 times', '250 times')
    """
    return f"{factor:.1f} times" if factor < 10 else f"{factor:,.0f} times"


def _flops(ours: Taken, other: Taken) -> str:
    if not ours.flops or not other.flops:
        return ""
    return f", {ours.flops / other.flops:.2f} of its FLOPs"
