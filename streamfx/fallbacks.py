"""Fallbacks of a compilation if an optional step fails: the result stays exact."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from streamfx.errors import NotStreamedError, describe_error
from streamfx.log import log

T = TypeVar("T")
NO_TREES = "associative scans of a graph run whole: the search for them failed"
NO_PRODUCTS = "products of blocks of rows run whole: the search for those with weights that decay failed"
NOT_DEFERRED = "a graph returns all its outputs as plain tensors: the search for those to defer failed"
INTERNAL = (
    "a graph is run without streaming: its analysis failed (%s). The result is exact, the memory is that of plain autograd. "
    "Please report this; strict=True raises an error instead."
)
NOT_LOOKED_AT = "nobody knows whether a graph fits into the memory budget as it stands: looking at that failed"
NOT_COMPARED = "nobody knows whether a graph takes less memory as it stands than in loops: looking at that failed"
AT_ONCE = "gradients of a graph are handed over at once, at the end: the search for where each is complete failed"
NOT_SPLIT = "a graph of two sequences is not split between them: that failed"
PARTLY_ON_META = (
    "a graph runs as in eager, without streaming: some of its inputs are on the meta device and others are not, and AOTAutograd "
    "cannot trace it (%s). Move all inputs to one device."
)
ALL_THE_SAME = "%s (%s). The result is exact; strict=True raises an error instead"


def try_step(step: Callable[[], T], otherwise: T, failed: str, strict: bool) -> T:
    """Return the result of a step; if it fails, warn with `failed` and return `otherwise`. Under `strict`, raise an error."""
    try:
        return step()
    except Exception as error:
        if strict:
            raise strict_error(f"{failed} ({describe_error(error)})") from error
        log.warning(ALL_THE_SAME, failed, describe_error(error), exc_info=log.isEnabledFor(logging.DEBUG))
        return otherwise


def warn_if_partly_on_meta(inputs: Sequence[Any], error: Exception) -> bool:
    """Warn if some inputs are on the meta device and others are not; return whether that is so."""
    is_mixed = {item.is_meta for item in inputs if isinstance(item, torch.Tensor)} == {True, False}
    if is_mixed:
        log.warning(PARTLY_ON_META, describe_error(error))
    return is_mixed


def strict_error(found: str) -> NotStreamedError:
    """Return the error that `strict=True` raises if an optional step fails."""
    return NotStreamedError(
        "strict=True asks that every stage streams", found, do="drop strict=True: the result is exact either way"
    )
