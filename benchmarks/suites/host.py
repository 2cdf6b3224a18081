"""What the host does beside operators."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.host_work import Run, runs_of, seconds
from benchmarks.settings import Rows, Settings
from benchmarks.training import Training

NARROW = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
CHUNK = 8


def host(settings: Settings) -> Rows:
    """Host work of each loop of a step on tiny tensors: medians of ratios within a round, processor seconds.

    `plain` is the body's code as torch.fx writes it, on rows that lie ready. To it are compared: that body written as an outer
    graph is, and as a body with compiled stretches is (with nothing compiled, so that operators are the same). What a loop
    takes beside its body, for views of rows and copies of results, is given per chunk and as a share of the body.
    """
    length = settings.lengths[0] if settings.lengths else CHUNK * (8 if settings.quick else 32)
    options = {"chunk_size": CHUNK, "loss_chunk_size": CHUNK, "save": "inputs"}
    sizes = {**NARROW, "vocab_size": 50, "num_hidden_layers": settings.layers or (1 if settings.quick else 2)}
    training = Training("streambp, eager bodies", length, sizes=sizes, options=options)
    rounds = settings.rounds or (3 if settings.quick else 100)
    rows: Rows = []
    for run in runs_of(training.step):
        settings.tell(run.loop.spec.name)
        rows.append(_row(run, rounds))
    return rows


def _row(run: Run, rounds: int) -> dict[str, Any]:
    found = seconds(run.ways(), rounds)
    plain, chunks = found["plain"], len(run.feeds)
    beside = [own - body for own, body in zip(found["loop"], plain, strict=True)]
    return {
        "loop": run.loop.spec.name,
        "chunks": chunks,
        "operators": run.operators,
        "plain µs / chunk": 1e6 * _median(plain) / chunks,
        "as an outer graph": _ratio(found["outer"], plain),
        "as a compiled body": _ratio(found["compiled"], plain),
        "loop beside it µs / chunk": 1e6 * _median(beside) / chunks,
        "of the body": _ratio(beside, plain),
    }


def _ratio(one: Sequence[float], other: Sequence[float]) -> float:
    return _median([own / its for own, its in zip(one, other, strict=True)])


def _median(values: Sequence[float]) -> float:
    return float(statistics.median(values))
