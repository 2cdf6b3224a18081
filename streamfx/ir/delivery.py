"""A backward half in stretches, each of which ends where gradients are complete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import fx

Saved: TypeAlias = "tuple[frozenset[int], ...]"  # for each tensor saved for a backward half: inputs in whose memory it may lie


@dataclass(frozen=True)
class Delivery:
    """A stretch of a backward half: the operators that run, which of the given tensors they read that somebody else may write to,
    and the gradients that are handed over behind them, by their place among the half's results.
    """

    operators: tuple[fx.Node, ...]
    reads: tuple[fx.Node, ...]
    gradients: dict[int, fx.Node]


def places_of(deliveries: Sequence[Delivery]) -> tuple[tuple[int, ...], ...]:
    """Which gradients each stretch hands over."""
    return tuple(tuple(sorted(delivery.gradients)) for delivery in deliveries)
