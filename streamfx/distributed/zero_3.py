"""Refuse parameters that DeepSpeed's ZeRO-3 has partitioned over ranks, and suggest alternatives."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from streamfx.errors import IntegrationError

MARKS = ("ds_id", "ds_status", "ds_shape")  # attributes of a partitioned parameter (DeepSpeed 0.19)
NOT_COMPILED = "streambp cannot compile a model of DeepSpeed's ZeRO-3"


def is_partitioned(parameter: Any) -> bool:
    """Return whether ZeRO-3 has partitioned a parameter over ranks: whether it has an attribute that only ZeRO-3 sets."""
    return any(hasattr(parameter, mark) for mark in MARKS)


def refuse_partitioned(parameters: Iterable[Any]) -> None:
    """Raise `IntegrationError` if any parameter is partitioned: compiling such a model increases its memory."""
    found = ", ".join(sorted({mark for parameter in parameters for mark in MARKS if hasattr(parameter, mark)}))
    if found:
        raise IntegrationError(
            NOT_COMPILED,
            found=f"parameters with {found}: a hook on every module gathers them, and the graph breaks at each hook",
            do="use ZeRO-2 (stage: 2 in DeepSpeed's configuration), or FSDP2 (fully_shard), which shards parameters, too",
        )
