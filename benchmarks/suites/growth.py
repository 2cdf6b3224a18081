"""How memory grows with the length of the sequence."""

from __future__ import annotations

from typing import Any

from benchmarks.processes import Measured
from benchmarks.settings import MIB, Rows, Settings

SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4, "num_key_value_heads": 2}


def growth(settings: Settings) -> Rows:
    """Memory against T and the chunk size; `slope` is bytes per token from one row to the next."""
    rows: Rows = []
    lengths = settings.lengths or ((1024, 2048) if settings.quick else (1024, 2048, 4096, 8192, 16384))
    for chunk in settings.chunk_sizes or ((256,) if settings.quick else (256, 1024)):
        before: dict[str, Any] | None = None
        for length in lengths:
            settings.tell(f"T = {length}, chunks of {chunk}")
            row = _row(length, chunk)
            if before:
                row["live bytes / token, slope"] = (row["live MiB"] - before["live MiB"]) * MIB / (length - before["T"])
            rows.append(row)
            before = row
    return rows


def _row(length: int, chunk: int) -> dict[str, Any]:
    options = {"chunk_size": chunk, "loss_chunk_size": 256}
    with Measured("streambp, eager bodies", length, sizes=SIZES, options=options) as process:
        predicted = process.ask("predicted")["predicted_bytes"]
        process.ask("measured")
        peak, live = process.ask("measured")["peak_bytes"], process.ask("live")["live_bytes"]
    return {
        "T": length,
        "chunk": chunk,
        "process peak MiB": peak / MIB,
        "live MiB": live / MIB,
        "predicted MiB": predicted / MIB,
        "predicted / live": predicted / live,
        "live bytes / token": live / length,
    }
