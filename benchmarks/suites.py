"""What is compared with what. Each suite returns rows for a table; `tell` shows progress."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.processes import Measured

Rows = list[dict[str, Any]]
Tell = Callable[[str], None]
METHODS = ("eager", "checkpointing", "inductor", "streambp", "streambp, inductor bodies")
MIB = 1 << 20


def step(quick: bool, tell: Tell) -> Rows:
    """A training step: 4 layers of width 512, vocabulary 32,000, float32. All ways take turns on the same machine."""
    length, rounds = (1024, 2) if quick else (8192, 3)
    with contextlib.ExitStack() as stack:
        ways = {method: stack.enter_context(Measured(method, length)) for method in METHODS}
        first: dict[str, dict[str, float]] = {}
        later: dict[str, Rows] = {method: [] for method in METHODS}
        for method, way in list(ways.items()):
            tell(f"first step, {method}")
            first[method] = way.ask("measured")
        for number in range(rounds):
            for method, way in ways.items():
                tell(f"round {number + 1} of {rounds}, {method}")
                later[method].append(way.ask("measured"))
    return [_step_row(method, length, first[method], later[method], later["checkpointing"]) for method in METHODS]


def _step_row(method: str, length: int, first: dict[str, float], steps: Rows, reference: Rows) -> dict[str, Any]:
    def median(rows: Rows, name: str) -> float:
        return float(statistics.median(row[name] for row in rows))

    peak, seconds, cpu = (median(steps, name) for name in ("peak_bytes", "seconds", "cpu_seconds"))
    return {
        "way": method,
        "T": length,
        "peak MiB": peak / MIB,
        "of checkpointing": peak / median(reference, "peak_bytes"),
        "s / step": seconds,
        "of checkpointing's": seconds / median(reference, "seconds"),
        "processor s": cpu,
        "of its": cpu / median(reference, "cpu_seconds"),
        "first step, more s": first["seconds"] - seconds,
        "loss": steps[-1]["loss"],
    }


def growth(quick: bool, tell: Tell) -> Rows:
    """Memory against T and the chunk size; `slope` is bytes per token from one row to the next."""
    rows: Rows = []
    lengths = (1024, 2048) if quick else (1024, 2048, 4096, 8192, 16384)
    for chunk in (256,) if quick else (256, 1024):
        before: dict[str, Any] | None = None
        for length in lengths:
            tell(f"T = {length}, chunks of {chunk}")
            row = _growth_row(length, chunk)
            if before:
                row["live bytes / token, slope"] = (row["live MiB"] - before["live MiB"]) * MIB / (length - before["T"])
            rows.append(row)
            before = row
    return rows


def _growth_row(length: int, chunk: int) -> dict[str, Any]:
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4, "num_key_value_heads": 2}
    with Measured("streambp", length, sizes, chunk_size=chunk, loss_chunk_size=256) as way:
        predicted = way.ask("predicted")["predicted_bytes"]
        way.ask("measured")
        peak, live = way.ask("measured")["peak_bytes"], way.ask("live")["live_bytes"]
    return {
        "T": length,
        "chunk": chunk,
        "process peak MiB": peak / MIB,
        "live MiB": live / MIB,
        "predicted MiB": predicted / MIB,
        "predicted / live": predicted / live,
        "live bytes / token": live / length,
    }


def compilation(quick: bool, tell: Tell) -> Rows:
    """Cold compilation with eager bodies: more chunks, same cost."""
    length = 1024
    ways = [
        ("aot_eager", {}),
        *(("streambp", {"chunk_size": length // n, "loss_chunk_size": length // n}) for n in (2, 64)),
    ]
    rows: Rows = []
    for number in range(1 if quick else 3):
        for method, options in ways:
            label = method if not options else f"{method}, {length // options['chunk_size']} chunks"
            tell(f"{label}, {number + 1}")
            with Measured(method, length, {"num_hidden_layers": 8}, **options) as way:
                rows.append({"way": label, **way.ask("compile")})
    return _medians(rows)


def analysis(quick: bool, tell: Tell) -> Rows:
    """The passes against AOTAutograd's own tracing of the same graph, by the number of layers; processor seconds."""
    rows: Rows = []
    for layers in (2, 8) if quick else (2, 4, 8, 16, 32, 64):
        tell(f"{layers} layers")
        sizes = {"num_hidden_layers": layers, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
        with Measured("streambp", 256, sizes | {"num_key_value_heads": 2}, chunk_size=64, loss_chunk_size=64) as way:
            found = way.ask("analysis")
        rows.append(
            {
                "layers": layers,
                "operators": found["nodes"],
                "tracing s": found["tracing"],
                "passes s": found["passes"],
                "of tracing": found["passes"] / found["tracing"],
                "passes ms / operator": 1000 * found["passes"] / found["nodes"],
            }
        )
    return rows


def _medians(rows: Rows) -> Rows:
    labels = list(dict.fromkeys(row["way"] for row in rows))
    result: Rows = []
    for label in labels:
        own = [row for row in rows if row["way"] == label]
        result.append({"way": label, **{f"{key} s": statistics.median(row[key] for row in own) for key in ("wall", "cpu")}})
        result[-1]["of aot_eager"] = result[-1]["cpu s"] / result[0]["cpu s"]
    return result


def operations(quick: bool, tell: Tell) -> Rows:
    """Operations of one step against gradient checkpointing's; attention counts the pairs that are seen."""
    length = 512 if quick else 2048
    with Measured("checkpointing", length) as way:
        tell("checkpointing")
        reference = way.ask("flops")
    rows: Rows = [_operations_row("checkpointing", reference, reference)]
    with Measured("eager", length) as way:
        rows.append(_operations_row("eager", way.ask("flops"), reference))
    for chunks in (1, 8) if quick else (1, 2, 4, 8, 16, 32, 64):
        tell(f"{chunks} chunks")
        size = length // chunks
        with Measured("streambp", length, chunk_size=size, loss_chunk_size=size) as way:
            way.ask("measured")
            rows.append(_operations_row(f"streambp, {chunks} chunks", way.ask("flops"), reference))
    return rows


def _operations_row(label: str, flops: dict[str, int], reference: dict[str, int]) -> dict[str, Any]:
    return {
        "way": label,
        "attention GFLOP": flops["attention"] / 1e9,
        "of checkpointing": flops["attention"] / reference["attention"],
        "everything else GFLOP": flops["other"] / 1e9,
        "of checkpointing's": flops["other"] / reference["other"],
    }


SUITES: dict[str, Callable[[bool, Tell], Rows]] = {
    "step": step,
    "growth": growth,
    "compilation": compilation,
    "analysis": analysis,
    "operations": operations,
}
