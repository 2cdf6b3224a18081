"""What a compilation does without where it fails: the result is exact all the same."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from streamfx.errors import told
from streamfx.log import log

T = TypeVar("T")
NO_TREES = "associative scans of a graph run whole: the search for them failed"
NO_PRODUCTS = "products of blocks of rows run whole: the search for those with weights that decay failed"
NOT_DEFERRED = "a graph returns all its outputs as plain tensors: the search for those to defer failed"
INTERNAL = (
    "a graph is run without streaming: its analysis failed (%s). The result is exact, the memory is that of plain autograd. "
    "Please report this; strict=True raises the error instead."
)
ALL_THE_SAME = "%s (%s). The result is exact. Please report this; strict=True raises the error instead."


def attempted(what: Callable[[], T], otherwise: T, failed: str, strict: bool) -> T:
    """What is found, or something else and a warning that says what `failed`; under `strict` the error."""
    try:
        return what()
    except Exception as error:
        if strict:
            raise
        log.warning(ALL_THE_SAME, failed, told(error), exc_info=log.isEnabledFor(logging.DEBUG))
        return otherwise
