"""From which length on is there a gain? Two peaks are looked at, at lengths that grow, and the answer is traced once more.

The lengths that may be named are the same for everybody, powers of two and three between each two of them: so the answer is one
of the model and its options, whatever length was asked for, as long as there is a gain at all lengths beyond.
"""

from __future__ import annotations

from collections.abc import Callable

from streamfx.tools.report.verdict import GAIN

STEPS = 4  # lengths that may be named, from one power of two to the next
STRIDE = 2 * STEPS  # of them, from one look to the next: four times as long
LAST = 16 * STEPS  # 262,144 tokens: nobody looks further
Peaks = Callable[[int], "tuple[int, int] | None"]  # ours and the other's at a length; None where one is not known


def gains_from(guess: Peaks, traced: Peaks, length: int, multiple: int) -> int | None:
    """A length at which `traced` sees a gain, about the shortest: looked for by `guess`. None where no gain was found.

    There is none at `length`, and none is looked for below.
    """
    for high in range(STRIDE, LAST + 1, STRIDE):
        at = named(high, multiple)
        if at > length and _gains(guess, at):
            nearest = named(_narrowed(guess, high - STRIDE, high, length, multiple), multiple)
            return next((item for item in dict.fromkeys((nearest, at)) if _gains(traced, item)), None)
    return None


def _narrowed(guess: Peaks, low: int, high: int, length: int, multiple: int) -> int:
    """The number of the first length with a gain, of those behind `low`; that of `high` has one."""
    while high - low > 1:
        middle = (low + high) // 2
        at = named(middle, multiple)
        low, high = (low, middle) if at > length and _gains(guess, at) else (middle, high)
    return high


def _gains(peaks: Peaks, length: int) -> bool:
    found = peaks(length)
    return found is not None and found[1] >= GAIN * found[0]


def named(number: int, multiple: int) -> int:
    """One of the lengths that may be named, made a multiple.

    >>> [named(number, 1) for number in range(9)], named(41, 1), named(41, 1000)
    ([4, 5, 6, 7, 8, 10, 12, 14, 16], 5120, 6000)
    """
    length = (STEPS + number % STEPS) << (number // STEPS)
    return -(-length // multiple) * multiple
