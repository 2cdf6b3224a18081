"""Report whether Inductor or streamfx is responsible if a graph could not be compiled."""

from __future__ import annotations

from streamfx.errors import describe_error
from streamfx.torch_private.inductor import InductorFailedError

NOT_COMPILED = (
    "a graph that fits into the memory budget as it stands is run without a compiler: %s. "
    'The result is exact; bodies="eager" asks for this without the attempt.'
)


def blame(error: Exception) -> str:
    """Return, for a warning that code runs uncompiled, which component failed."""
    if isinstance(error, InductorFailedError):
        return f"Inductor failed ({error})"
    return f"streamfx failed ({describe_error(error)}; please report this)"
