"""The plan: how large chunks are and what is kept from the forward half, per stage."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx


@dataclass(frozen=True)
class ChunkPlan:
    """`chunk_sizes` in rows of the sequence, and values `kept` beside the stage's outputs, both by stage."""

    chunk_sizes: tuple[int, ...]
    kept: tuple[tuple[fx.Node, ...], ...]
