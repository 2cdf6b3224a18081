"""How the bytes that are alive along a step grow with its size: what a search expects of sizes that it has not traced.

At each moment rows of the sequence take bytes that grow as the size does, weights and their gradients do not. So the peak is at
one moment for short sequences (all gradients are there) and at another for long ones (inputs of stages are): each moment is asked
by itself where it would reach the limit.

The work on a chunk takes what its rows take, and grows by the keys that they see. By how much is seen in a trace of few layers
at another size: it is the same for any number of layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from streamfx.cost.categories import (
    ATTENTION,
    CHUNK,
    EXCHANGED,
    INPUTS,
    KEY_GRADIENTS,
    KEYS,
    LOSS,
    OTHER,
    STAGE_INPUTS,
    STATES,
    STREAM_GRADIENT,
)
from streamfx.tools.inspect.explain import OURS
from streamfx.tools.planner.predict import Prediction

GROWING = (STAGE_INPUTS, STREAM_GRADIENT, KEYS, KEY_GRADIENTS, STATES, INPUTS, EXCHANGED, ATTENTION, OTHER)
WORK = (CHUNK, LOSS)
Growth: TypeAlias = "Mapping[str, float]"  # bytes of a term for each token or sequence more


def size_within(limit: float, size: int, found: Prediction, growth: Growth) -> int:
    """The largest size at which no moment of a step takes more than a limit, given its moments at a size."""
    slopes = ((sum(terms.values()), _slope(terms, size, growth)) for terms in moments_of(found))
    return int(size + min((limit - total) / max(slope, 1) for total, slope in slopes))


def _slope(terms: Mapping[str, int], size: int, growth: Growth) -> float:
    """What a moment takes more, for each token or sequence more."""
    return sum(terms.get(name, 0) for name in GROWING) / size + sum(growth.get(name, 0) for name in WORK if terms.get(name))


def growth_of(size: int, found: Prediction, other: int, few: Prediction) -> Growth:
    """How the work on a chunk grows from one size to another, seen by predictions of any number of layers."""
    return {name: (_most(name, few) - _most(name, found)) / (other - size) for name in WORK}


def _most(name: str, found: Prediction) -> int:
    return max(terms.get(name, 0) for terms in moments_of(found))


def moments_of(found: Prediction) -> list[Mapping[str, int]]:
    """The bytes alive by term, all along the step; those of the peak where no more is known."""
    curve = found.curves.get(OURS)
    return [found.peak_by_term] if curve is None else [point.terms for point in curve[0].points]
