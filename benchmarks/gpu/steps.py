"""Steps of real layers: time and memory beside checkpointing, memory beside the plan, and what offloading costs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.gpu import Finding, Place
from benchmarks.processes import Failed, Measured

LAYERS = {"model": "Qwen3-8B", "num_hidden_layers": 4}
TINY = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
STEPS = 3
WAYS = ("checkpointing", "checkpointing, Liger loss", "checkpointing, CCE", "streambp", "streambp, everything fits")
OFFLOAD = ("streambp, inputs kept", "streambp, inputs offloaded")


def beside_checkpointing(place: Place) -> Iterator[Finding]:
    """Seconds and the allocator's peak of a step, beside those of checkpointing; the peak beside the plan's."""
    for length in (64,) if place.small else (8192, 32768):
        found = {way: _measured(place, way, length) for way in (("checkpointing", "streambp") if place.small else WAYS)}
        yield from _compared(found, "checkpointing", length)
        ours = found["streambp"]
        if "predicted_bytes" in ours:
            yield Finding(
                f"streambp, {length} tokens", "peak bytes, beside the plan's", ours["peak_bytes"], ours["predicted_bytes"]
            )


def offload(place: Place) -> Iterator[Finding]:
    """What a step takes with its inputs on the host, beside one that keeps them: copies run beside the work."""
    length = 64 if place.small else 16384
    yield from _compared({way: _measured(place, way, length) for way in OFFLOAD}, OFFLOAD[0], length)


def _compared(found: dict[str, dict[str, Any]], reference: str, length: int) -> Iterator[Finding]:
    for way, outcome in found.items():
        case = f"{way}, {length} tokens"
        if "why not" in outcome:
            yield Finding(case, "did not run", outcome["why not"])
            continue
        for what in ("seconds", "peak_bytes"):
            beside = found[reference].get(what)
            yield Finding(case, f"{what.replace('_', ' ')}, beside {reference}", outcome[what], beside)


def _measured(place: Place, way: str, length: int) -> dict[str, Any]:
    """The fastest of a few steps, each after the first."""
    dtype = "bfloat16" if place.device.startswith("cuda") else "float32"
    try:
        with Measured(way, length, sizes=TINY if place.small else LAYERS, dtype=dtype, device=place.device) as process:
            taken = [process.ask("measured") for _ in range(2 if place.small else STEPS + 1)][1:]
            best = min(taken, key=lambda step: step["seconds"])
            predicted = process.ask("predicted") if way == "streambp" else {}
            return {**best, **predicted}
    except Failed as error:
        return {"why not": str(error)}
