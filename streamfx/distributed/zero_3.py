"""Parameters that DeepSpeed's ZeRO-3 has partitioned: whoever would compile them is told what to take."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from streamfx.errors import IntegrationError

MARKS = ("ds_id", "ds_status", "ds_shape")  # DeepSpeed (0.19) knows such a parameter by the first, and leaves all of them on it
ASKED = "streambp cannot compile a model of DeepSpeed's ZeRO-3"


def is_partitioned(parameter: Any) -> bool:
    """Whether ZeRO-3 holds a part of a parameter on each rank."""
    return any(hasattr(parameter, mark) for mark in MARKS)


def refuse_partitioned(parameters: Iterable[Any]) -> None:
    """Raise `IntegrationError` if any parameter is partitioned: compiled, such a model takes more memory than before."""
    found = ", ".join(sorted({mark for parameter in parameters for mark in MARKS if hasattr(parameter, mark)}))
    if found:
        raise IntegrationError(
            ASKED,
            found=f"parameters with {found}: a hook on every module gathers them, and the graph is cut at each",
            do="take ZeRO-2 (stage: 2 in DeepSpeed's configuration), or FSDP2 (fully_shard), which shards parameters, too",
        )
