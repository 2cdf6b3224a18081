"""Sample calls for every operator that has a rule, over sizes b t d k v that may well be equal.

Each file here registers the samples of one kind of operator when it is imported.
"""

from __future__ import annotations

from tests.support.samples import (  # noqa: F401
    attention,
    constants,
    convolutions,
    experts,
    lookups,
    losses,
    pointwise,
    recurrences,
    reductions,
    stateful,
    views,
)
from tests.support.samples.registry import SAMPLES, Sizes, calls

__all__ = ["SAMPLES", "Sizes", "calls"]
