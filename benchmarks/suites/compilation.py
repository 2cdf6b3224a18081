"""What compilation takes."""

from __future__ import annotations

import statistics

from benchmarks.processes import Measured
from benchmarks.settings import Rows, Settings

LENGTH = 1024


def compilation(settings: Settings) -> Rows:
    """Cold compilation of 8 layers with eager bodies: more chunks, same cost."""
    ways = [
        ("aot_eager", {}),
        *(("streambp, eager bodies", {"chunk_size": LENGTH // n, "loss_chunk_size": LENGTH // n}) for n in (2, 64)),
    ]
    rows: Rows = []
    for number in range(settings.rounds or (1 if settings.quick else 3)):
        for way, options in ways:
            label = way if not options else f"{way}, {LENGTH // options['chunk_size']} chunks"
            settings.tell(f"{label}, {number + 1}")
            with Measured(way, LENGTH, sizes={"num_hidden_layers": 8}, options=options) as process:
                rows.append({"way": label, **process.ask("compile")})
    return _medians(rows)


def _medians(rows: Rows) -> Rows:
    result: Rows = []
    for label in dict.fromkeys(row["way"] for row in rows):
        own = [row for row in rows if row["way"] == label]
        result.append({"way": label, **{f"{key} s": statistics.median(row[key] for row in own) for key in ("wall", "cpu")}})
        result[-1]["of aot_eager"] = result[-1]["cpu s"] / result[0]["cpu s"]
    return result
