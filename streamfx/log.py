"""The logger for `TORCH_LOGS="streamfx"` and `TORCH_LOGS="+streamfx"`, and the passes that `STREAMFX_LOGS` selects."""

from __future__ import annotations

import logging
import os
from functools import cache

from streamfx.torch_private import register_logger

ENVIRONMENT = "STREAMFX_LOGS"  # names of passes or of their packages, separated by commas: "partition,key_spans"

log = logging.getLogger("streamfx")
register_logger("streamfx")


def selected_passes() -> frozenset[str]:
    """Return the names in the environment variable `STREAMFX_LOGS`; empty if it is not set."""
    return frozenset(name.strip() for name in os.environ.get(ENVIRONMENT, "").split(",")) - {""}


@cache
def pass_log() -> logging.Logger:
    """Return the logger of the passes that `STREAMFX_LOGS` selects, which writes to stderr whatever `TORCH_LOGS` is."""
    logger = logging.getLogger("streamfx.passes")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(logging.StreamHandler())
    logger.propagate = False
    return logger


@cache
def report_unknown_passes(names: frozenset[str]) -> None:
    """Warn, once, of names in `STREAMFX_LOGS` that no pass and no package of passes has."""
    log.warning("%s: no pass is named %s; TORCH_LOGS=+streamfx names all", ENVIRONMENT, ", ".join(sorted(names)))
