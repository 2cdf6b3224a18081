"""Texts for graphs that could not be compiled: whether Inductor or streamfx failed."""

from __future__ import annotations

from streamfx.errors import describe_error
from streamfx.torch_private.inductor import InductorFailedError

NOT_COMPILED = (
    "a graph that fits into the memory budget without chunks runs uncompiled: %s. "
    'The result is exact; bodies="eager" does this without the attempt.'
)


def blame(error: Exception) -> str:
    """Return, for a warning that code runs uncompiled, whether Inductor or streamfx failed, and with which error."""
    if isinstance(error, InductorFailedError):
        return f"Inductor failed ({error})"
    return f"streamfx failed ({describe_error(error)}; please report this)"
