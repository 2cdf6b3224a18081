"""Sample calls for every operator that has a rule, over sizes b t d k v that may well be equal.

Each file here registers the samples of some kinds of operators when it is imported.
"""

from __future__ import annotations

from tests.support.samples import mixing, moving  # noqa: F401
from tests.support.samples.registry import SAMPLES, Sizes, calls

__all__ = ["SAMPLES", "Sizes", "calls"]
