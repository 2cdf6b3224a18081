"""The growth of memory along a step with its size (length or batch), to extrapolate to sizes that were not traced.

At each point of a step, the sequence's values grow linearly with the size, but weights and their gradients do not. So
short sequences peak at one point (all gradients are alive), long ones at another (stage inputs are alive). Each point
is extrapolated separately.

The work of a chunk depends on its query positions and grows with the key positions they see. Its growth is taken from a
trace of a few layers at another size, because it does not depend on the number of layers.
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
Growth: TypeAlias = "Mapping[str, float]"  # additional bytes of a category per additional token or sequence


def size_within(limit: float, size: int, prediction: Prediction, growth: Growth) -> int:
    """Return the largest size at which no point of a step exceeds the limit, given a prediction at one size."""
    slopes = ((sum(terms.values()), _slope(terms, size, growth)) for terms in bytes_at_points(prediction))
    return int(size + min((limit - total) / max(slope, 1) for total, slope in slopes))


def _slope(terms: Mapping[str, int], size: int, growth: Growth) -> float:
    """Return the additional bytes at a point of the step per additional token or sequence."""
    return sum(terms.get(name, 0) for name in GROWING) / size + sum(growth.get(name, 0) for name in WORK if terms.get(name))


def growth_of(size: int, prediction: Prediction, other_size: int, other_prediction: Prediction) -> Growth:
    """Return the growth of the chunk work between two sizes; both predictions may have any number of layers."""
    return {
        name: (_peak_of_term(name, other_prediction) - _peak_of_term(name, prediction)) / (other_size - size) for name in WORK
    }


def _peak_of_term(name: str, prediction: Prediction) -> int:
    """Return the largest size of a category over the step."""
    return max(terms.get(name, 0) for terms in bytes_at_points(prediction))


def bytes_at_points(prediction: Prediction) -> list[Mapping[str, int]]:
    """Return the bytes alive by category at all points of the step, or only those of the peak if there is no curve."""
    curve = prediction.curves.get(OURS)
    return [prediction.peak_by_term] if curve is None else [point.terms for point in curve[0].points]
