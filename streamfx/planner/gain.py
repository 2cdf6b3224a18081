"""From which length on is there a gain? Two peaks are looked at, at lengths that grow, and the answer is traced once more."""

from __future__ import annotations

from collections.abc import Callable

from streamfx.report.verdict import GAIN

FURTHER = 4  # times as long, from one look to the next
LOOKS = 3
HALVINGS = 3  # of what is between the last length without a gain and the first with one

Peaks = Callable[[int], "tuple[int, int] | None"]  # ours and the other's at a length; None where one is not known


def gains_from(guess: Peaks, traced: Peaks, length: int, multiple: int) -> int | None:
    """A length at which `traced` sees a gain, about the shortest: looked for by `guess`. None where no gain was found."""
    for look in range(1, LOOKS + 1):
        high = length * FURTHER**look
        if _gains(guess, high):
            nearest = _narrowed(guess, high // FURTHER, high, multiple)
            return next((item for item in dict.fromkeys((nearest, high)) if _gains(traced, item)), None)
    return None


def _narrowed(guess: Peaks, low: int, high: int, multiple: int) -> int:
    for _ in range(HALVINGS):
        middle = _rounded_up((low * high) ** 0.5, multiple)
        if not low < middle < high:
            break
        low, high = (low, middle) if _gains(guess, middle) else (middle, high)
    return high


def _gains(peaks: Peaks, length: int) -> bool:
    found = peaks(length)
    return found is not None and found[1] >= GAIN * found[0]


def _rounded_up(length: float, multiple: int) -> int:
    """With two digits, and a multiple.

    >>> _rounded_up(2047.5, 1), _rounded_up(64, 8), _rounded_up(13, 8)
    (2100, 64, 16)
    """
    unit = 10 ** max(len(str(int(length))) - 2, 0)
    rounded = -(-int(-(-length // 1)) // unit) * unit
    return -(-rounded // multiple) * multiple
