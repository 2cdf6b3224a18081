"""Fallbacks of a compilation if an optional step fails: the result stays exact.

An optional step only saves memory or time (a search for patterns, an estimate). Without `strict`, its failure is a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from streamfx.errors import NotStreamedError, describe_error
from streamfx.log import log

T = TypeVar("T")
SCANS_NOT_MATCHED = "associative scans of a graph fall back: the search for them failed"
SSD_NOT_MATCHED = "matrix products of blocks of rows fall back: the search for products with decaying weights failed"
NOT_DEFERRED = "a graph returns all its outputs as plain tensors: the search for outputs to defer failed"
INTERNAL = (
    "a graph runs unchunked: its analysis failed (%s). The result is exact, and takes as much memory as plain autograd. "
    "Please report this; strict=True raises an error instead."
)
NOT_BOUNDED = "it is unknown whether a graph fits into the memory budget unchunked: the estimate failed"
NOT_COMPARED = "it is unknown whether a graph takes less memory unchunked than in loops: the comparison failed"
GRADIENTS_AT_END = "autograd gets all gradients of a graph at its end: the search for the stage that completes each failed"
NOT_SPLIT = "a graph of two sequences is not split into two graphs: the attempt failed"
PARTLY_ON_META = (
    "a graph runs in eager mode: some of its inputs are on the meta device and others are not, so AOTAutograd cannot trace it "
    "(%s). Move all inputs to one device."
)
STILL_EXACT = "%s (%s). The result is exact; strict=True raises an error instead"


def try_step(step: Callable[[], T], default: T, failure: str, strict: bool) -> T:
    """Return the result of an optional `step`; if it raises an error, warn with the text `failure`, and return `default`.

    Under `strict`, raise `NotStreamedError` instead.
    """
    try:
        return step()
    except Exception as error:
        if strict:
            raise strict_error(f"{failure} ({describe_error(error)})") from error
        log.warning(STILL_EXACT, failure, describe_error(error), exc_info=log.isEnabledFor(logging.DEBUG))
        return default


def warn_if_partly_on_meta(inputs: Sequence[Any], error: Exception) -> bool:
    """Return whether some inputs are on the meta device and others are not, and warn if so.

    AOTAutograd cannot trace such a graph: it failed with `error`, and the graph runs in eager mode.
    """
    is_mixed = {item.is_meta for item in inputs if isinstance(item, torch.Tensor)} == {True, False}
    if is_mixed:
        log.warning(PARTLY_ON_META, describe_error(error))
    return is_mixed


def strict_error(found: str) -> NotStreamedError:
    """Return the error that `strict=True` raises if an optional step fails; `found` says which step, and why."""
    return NotStreamedError(
        "strict=True requires every stage to stream", found, do="drop strict=True: the result is exact either way"
    )
