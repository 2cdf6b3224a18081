"""What the first step spends, by phase."""

from __future__ import annotations

from benchmarks.phases import AFTER_PASSES, BEFORE_PASSES, TOTAL
from benchmarks.processes import Measured
from benchmarks.settings import Rows, Settings
from benchmarks.suites.analysis import NARROW

PASSES = "all passes"
SMALLEST = 0.01  # seconds: passes that take less are not listed


def first_step(settings: Settings) -> Rows:
    """The first step of a narrow Llama with eager bodies, by phase: processor seconds of the fastest of some processes, by
    the number of layers. Passes are listed under their names, if one takes 10 ms. "First run" is all of the step that
    comes after tracing and planning; the second step shows what of it is the model's own.
    """
    options = {"chunk_size": 64, "loss_chunk_size": 64}
    columns: dict[int, dict[str, float]] = {}
    for layers in (settings.layers,) if settings.layers else (1, 2) if settings.quick else (4, 16, 36):
        sizes = {**NARROW, "vocab_size": 2_000, "num_hidden_layers": layers}
        runs = []
        for number in range(settings.rounds or (1 if settings.quick else 3)):
            settings.tell(f"{layers} layers, {number + 1}")
            with Measured("streambp, eager bodies", 256, sizes=sizes, options=options) as process:
                runs.append(process.ask("first step"))
        columns[layers] = min(runs, key=lambda run: run[TOTAL])
    return _rows(columns)


def _rows(columns: dict[int, dict[str, float]]) -> Rows:
    """One row per phase, in order, and one column per number of layers."""
    passes = [name for name in next(iter(columns.values())) if name not in (*BEFORE_PASSES, *AFTER_PASSES)]
    for seconds in columns.values():
        seconds[PASSES] = sum(seconds[name] for name in passes)
    listed = [name for name in passes if any(seconds[name] >= SMALLEST for seconds in columns.values())]
    return [
        {"phase": name, **{f"{layers} layers": round(seconds[name], 3) for layers, seconds in columns.items()}}
        for name in (*BEFORE_PASSES, *listed, PASSES, *AFTER_PASSES)
    ]
