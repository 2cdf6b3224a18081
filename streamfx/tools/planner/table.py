"""Longest sequences by the memory of a card and by way of training, with streamfx and with gradient checkpointing.

Cards share traces. Streamfx's memory curve at one length is extrapolated to each card, as in `search.py`; two traces of a few
layers give the growth of a chunk's work, and of other values, some of which are weights. Peaks of checkpointing are convex in the
length, and are interpolated between two traces.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from streamfx.cost.categories import OPTIMIZER, OTHER
from streamfx.errors import PlanError
from streamfx.progress import show_activity
from streamfx.tools.inspect.layers import first_layers, layers_of
from streamfx.tools.planner.baselines import baselines_of
from streamfx.tools.planner.search import (
    CHUNK_TERMS,
    FIRST_LENGTH,
    LENGTH_MULTIPLE,
    OFFLOAD_LENGTH_FACTOR,
    growth_of,
    size_within,
    with_least_memory,
)
from streamfx.tools.planner.step import FEW_LAYERS, TrainingStep
from streamfx.tools.report.html import table_html
from streamfx.tools.report.page import Table
from streamfx.tools.report.paths import written
from streamfx.tools.report.text import table_lines
from streamfx.tools.report.verdict import CHECKPOINTING, CHUNKED, IN_CHUNKS

CARDS = (24, 40, 48, 80, 141, 192)  # GiB
MIN_LENGTH = 4096  # shorter sequences are not worth a row
BASELINE_LENGTHS = (MIN_LENGTH, 131072)  # of the traces of a baseline
LORA_RANK, QUANTIZE = 16, "nf4"
STREAMFX = "streamfx"
TARGET_SHARE = 0.99  # of the memory: no trace confirms a length, and two estimates were off by 0.2 and 0.5 %
WAYS = {CHECKPOINTING: CHECKPOINTING, IN_CHUNKS: CHUNKED}  # baselines of the table


@dataclass(frozen=True)
class LengthRow:
    """The longest length on each card, 0 if not even `MIN_LENGTH` tokens fit, of one way to train and to run a step."""

    training: str
    way: str
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class LengthTable:
    """The longest sequences of a model: it prints as a table, and `summary()` is a dictionary."""

    name: str
    counted: str
    rows: tuple[LengthRow, ...]

    def summary(self) -> dict[str, Any]:
        """Return all lengths, in tokens, as plain JSON types."""
        rows = [{"training": row.training, "way": row.way, "lengths": list(row.lengths)} for row in self.rows]
        return {"model": self.name, "counted": self.counted, "memory_gib": list(CARDS), "rows": rows}

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the table as one HTML file. Raise `ReportError` if it cannot be written."""
        header = ("", *(f"{size} GiB" for size in CARDS))
        cells = tuple((f"{row.training}: {row.way}", *map(_in_k, row.lengths)) for row in self.rows)
        return written(path, table_html(self.title, self.counted, Table("Tokens by the memory of a card", header, cells, NOTE)))

    @property
    def title(self) -> str:
        return f"{self.name}: longest sequences"

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        """Yield the title, the table with each way of training named once, and the note."""
        yield f"{self.title}, {self.counted}"
        header = ("trained", "", *(f"{size} GiB" for size in CARDS))
        rows, previous = [header], ""
        for row in self.rows:
            way = row.way.replace(f"{CHECKPOINTING} ", "... ")
            rows.append((row.training if row.training != previous else "", way, *map(_in_k, row.lengths)))
            previous = row.training
        yield from table_lines(rows)
        yield f"  {NOTE}"


NOTE = f"K is 1,024 tokens; -: fewer than {MIN_LENGTH // 1024}K; estimated, `--max-length` confirms a length by a trace"


def _in_k(length: int) -> str:
    return f"{length >> 10:,}K" if length else "-"


def length_table(request: SimpleNamespace, step_of: Callable[[SimpleNamespace], TrainingStep]) -> LengthTable:
    """Return the table for a request to `plan`, of which `step_of` makes a step; its adapters have the request's rank, if any."""
    fixed = (request.memory, request.host_memory, request.inputs, request.max_length, request.max_batch, request.frontier)
    if request.world > 1 or request.objective != "sft" or any(fixed):
        found = "several devices, an objective, a limit of memory, a search, a frontier, or inputs"
        raise PlanError("a table has the longest sequences of one device for 'sft', by its memory", found=found, do="omit them")
    rank, scheme = request.lora_rank or LORA_RANK, request.quantize or QUANTIZE
    trainings: dict[str, dict[str, Any]] = {
        "all parameters": {"lora_rank": None, "quantize": None},
        f"LoRA, rank {rank}": {"lora_rank": rank, "quantize": None},
        f"QLoRA, rank {rank}, {scheme}": {"lora_rank": rank, "quantize": scheme},
    }
    rows: list[LengthRow] = []
    for number, (training, changes) in enumerate(trainings.items(), 1):
        with show_activity(f"{number} of {len(trainings)}: {training}"):
            step = step_of(SimpleNamespace(**{**vars(request), **changes}))
            rows.append(LengthRow(training, STREAMFX, _streamed_lengths(step, request)))
            if request.baselines:
                rows += (LengthRow(training, way, lengths) for way, lengths in _baseline_lengths(step, request).items())
    offload = request.options.get("offload", "none")
    counted = f"batch {request.batch}, {request.dtype}, {OPTIMIZER} {request.optimizer}, offload {offload}, {step.device.name}"
    return LengthTable(step.name, counted, tuple(rows))


def _streamed_lengths(step: TrainingStep, request: SimpleNamespace) -> tuple[int, ...]:
    """Return the longest length on each card, extrapolated from one trace of the model and two of a few of its layers."""
    num_layers = len(layers_of(step.model))
    options = with_least_memory(request.batch, num_layers + 1, request.options)
    first = FIRST_LENGTH * (1 if options.get("offload", "none") == "none" else OFFLOAD_LENGTH_FACTOR)
    prediction = step.at(request.batch, first, options)
    far = max(_rounded(size_within(_target(CARDS[-1]), first, prediction, {})), 2 * first)
    with first_layers(step.model, FEW_LAYERS) if num_layers > 2 * FEW_LAYERS else nullcontext():
        few = [step.at(request.batch, length, options) for length in (first, far)]
    growth = growth_of(first, few[0], far, few[1], (*CHUNK_TERMS, OTHER))
    return tuple(_rounded(size_within(_target(card), first, prediction, growth)) for card in CARDS)


def _baseline_lengths(step: TrainingStep, request: SimpleNamespace) -> dict[str, tuple[int, ...]]:
    """Return the longest length of each baseline on each card, from the peaks at two lengths."""
    baselines = {WAYS[name]: baseline for name, baseline in baselines_of(step.model).items() if name in WAYS}
    peak_at = step.baseline_peaks(request.batch, BASELINE_LENGTHS[0])
    peaks = {way: [peak_at(baseline, length) for length in BASELINE_LENGTHS] for way, baseline in baselines.items()}
    return {
        way: tuple(_rounded(_length_at(_target(card), low, high)) for card in CARDS)
        for way, (low, high) in peaks.items()
        if low is not None and high is not None
    }


def _length_at(limit: float, low: int, high: int) -> int:
    """Return the length at which the line through the peaks at `BASELINE_LENGTHS` reaches the limit."""
    short, long = BASELINE_LENGTHS
    return int(short + (limit - low) * (long - short) / max(high - low, 1))


def _target(card: int) -> float:
    return TARGET_SHARE * (card << 30)  # bytes


def _rounded(length: int) -> int:
    """Round a length down to a multiple; 0 if it is too short."""
    return length // LENGTH_MULTIPLE * LENGTH_MULTIPLE if length >= MIN_LENGTH else 0
