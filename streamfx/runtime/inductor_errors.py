"""Who is to blame where nothing was compiled?"""

from __future__ import annotations

from streamfx.errors import told
from streamfx.torch_private.inductor import InductorFailedError

NOT_COMPILED = (
    "a graph that fits into the memory budget as it stands is run without a compiler: %s. "
    'The result is exact; bodies="eager" asks for this without the attempt.'
)


def blame(error: Exception) -> str:
    """For a warning that something runs without a compiler: whose failure that is."""
    if isinstance(error, InductorFailedError):
        return f"Inductor failed ({error})"
    return f"streamfx failed ({told(error)}; please report this)"
