"""The head and the loss alone, where the vocabulary is large."""

from __future__ import annotations

from typing import Any

from benchmarks.processes import Failed, Measured
from benchmarks.settings import Rows, Settings

QUICK = ("eager", "checkpointing, loss in parts", "streambp, eager bodies")
WAYS = (*QUICK, "streambp")
ALL_AT_ONCE = "eager"


def head(settings: Settings) -> Rows:
    """Hidden states [T, 1,024], a head of 128,256 rows, and the loss; gradients of both. One step in a process of its own.

    `step` is the process's high-water mark over the state before, gradients included; `held` are hidden states and weight;
    `in all` is their sum. Eager holds all logits, so it is run at shorter lengths and its line continued.
    """
    width, vocabulary = (256, 32_064) if settings.quick else (1024, 128_256)
    length = settings.lengths[0] if settings.lengths else 4096 if settings.quick else 32_768
    sizes = {"width": width, "vocabulary": vocabulary}
    rows: Rows = []
    for way in settings.chosen(QUICK if settings.quick else WAYS):
        if way == ALL_AT_ONCE:
            rows += _continued(settings, sizes, length)
        else:
            rows.append(_row(settings, way, sizes, length))
    return rows


def _row(settings: Settings, way: str, sizes: dict[str, int], length: int) -> dict[str, Any]:
    settings.tell(f"{way}, T = {length}")
    spec: dict[str, Any] = {"workload": "head", "sizes": sizes, **settings.place}
    first = {"way": way, "type": settings.dtype, "T": length}
    try:
        with Measured(way, length, **spec) as process:
            process.ask("warm")
            held, step = process.ask("held"), process.ask("measured")
    except Failed as failure:
        return {**first, "why not": str(failure)}
    return {
        **first,
        "held MB": held["held_bytes"] / 1e6,
        "of the step, gradients MB": held["gradient_bytes"] / 1e6,
        "step MB": step["peak_bytes"] / 1e6,
        "in all MB": (held["held_bytes"] + step["peak_bytes"]) / 1e6,
        "s": step["seconds"],
        "processor s": step["cpu_seconds"],
        "loss": step["loss"],
    }


def _continued(settings: Settings, sizes: dict[str, int], length: int) -> Rows:
    """Two short lengths as seen, and the straight line through them at the full one."""
    near, far = (_row(settings, ALL_AT_ONCE, sizes, length // part) for part in (32, 16))
    if "why not" in near or "why not" in far:
        return [near, far]
    names = ("held MB", "of the step, gradients MB", "step MB", "in all MB")
    slopes = {name: (far[name] - near[name]) / (far["T"] - near["T"]) for name in names}
    at_length = {name: far[name] + slope * (length - far["T"]) for name, slope in slopes.items()}
    return [far, {"way": f"{ALL_AT_ONCE}, computed", "type": settings.dtype, "T": length, **at_length}]
