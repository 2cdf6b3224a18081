"""Who is to blame where nothing was compiled?"""

from __future__ import annotations

from streamfx.errors import told
from streamfx.torch_private import InductorFailed


def blame(error: Exception) -> str:
    """For a warning that something runs without a compiler: whose failure that is."""
    if isinstance(error, InductorFailed):
        return f"Inductor failed ({error})"
    return f"streamfx failed ({told(error)}; please report this)"
