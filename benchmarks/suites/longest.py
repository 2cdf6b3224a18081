"""The longest sequence that a step can have under a memory cap."""

from __future__ import annotations

from typing import Any

from benchmarks.processes import Failed, Measured
from benchmarks.settings import MIB, Rows, Settings
from benchmarks.ways import WAYS as WAYS_BY_NAME

WAYS = ("eager", "checkpointing", "streambp, eager bodies", "streambp, every 2nd input", "streambp, inputs offloaded")
STEP = 1.0625  # lengths that are nearer to each other are not told apart
SMALL = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 8, "num_attention_heads": 2, "num_key_value_heads": 1}


def longest(settings: Settings) -> Rows:
    """The longest T whose step stays under the cap: the process's high-water mark over the state before, gradients included.

    Found by bisection to a sixteenth, each length in a process of its own (its second step, so that no compilation counts). The
    backend is told the cap as its `memory_budget`, of which parameters and inputs are a part.
    """
    quick = {**SMALL, "vocab_size": 4096}
    sizes = quick if settings.quick and not settings.sizes else settings.sizes
    cap = (settings.cap or (128 if settings.quick else 320)) * MIB
    rows: Rows = []
    for way in settings.chosen(WAYS[:3] if settings.quick else WAYS):
        search = _Search(settings, way, sizes, cap)
        length = search.longest(256)
        rows.append({"way": way, "cap MiB": cap // MIB, **search.seen.get(length, {}), "lengths tried": len(search.seen)})
    eager = next((row["T"] for row in rows if row["way"] == "eager" and "T" in row), None)
    return [{**row, "of eager's": row["T"] / eager if eager and "T" in row else None} for row in rows]


class _Search:
    def __init__(self, settings: Settings, way: str, sizes: dict[str, Any], cap: int) -> None:
        self.settings, self.way, self.sizes, self.cap = settings, way, sizes, cap
        self.seen: dict[int, dict[str, Any]] = {}

    def longest(self, length: int) -> int:
        """Double until it does not fit (halve until it does), then bisect."""
        fits, too_long = 0, 0
        while not (fits and too_long):
            if self.fits(length):
                fits, length = length, length * 2
            else:
                too_long, length = length, length // 2
                if not length:
                    return 0
        while too_long / fits > STEP:
            middle = int((fits * too_long) ** 0.5) // 8 * 8
            if middle in (fits, too_long):
                break
            if self.fits(middle):
                fits = middle
            else:
                too_long = middle
        return fits

    def fits(self, length: int) -> bool:
        self.settings.tell(f"{self.way}, T = {length}")
        try:
            with Measured(self.way, length, sizes=self.sizes, options=self.options(length), **self.settings.place) as process:
                first = process.ask("measured")
                step = process.ask("measured") if first["peak_bytes"] < 2 * self.cap else first
        except Failed:  # out of memory
            return False
        peak = min(first["peak_bytes"], step["peak_bytes"])
        self.seen[length] = {"T": length, "peak MiB": peak / MIB, "s / step": step["seconds"]}
        return peak <= self.cap

    def options(self, length: int) -> dict[str, Any]:
        """What the way's compiler is told beside its own options."""
        if WAYS_BY_NAME[self.way].backend != "streambp":
            return {}
        with Measured("eager", length, sizes=self.sizes, **self.settings.place) as process:
            return {"memory_budget": self.cap + process.ask("held")["held_bytes"]}
