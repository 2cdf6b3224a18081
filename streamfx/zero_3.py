"""Parameters that DeepSpeed's ZeRO-3 has partitioned: whoever would compile them is told what to take."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from streamfx.errors import IntegrationError

MARK = "ds_id"  # by which DeepSpeed (0.19) itself knows such a parameter


def is_partitioned(parameter: Any) -> bool:
    """Whether ZeRO-3 holds a part of a parameter on each rank."""
    return hasattr(parameter, MARK)


def refuse_partitioned(parameters: Iterable[Any], asked: str) -> None:
    """Raise `IntegrationError` if any parameter is partitioned: compiled, such a model takes more memory than before."""
    if any(map(is_partitioned, parameters)):
        raise IntegrationError(
            asked,
            found=f"parameters with {MARK}: a hook on every module gathers them, and the graph is cut at each",
            do="take ZeRO-2 (stage: 2 in DeepSpeed's configuration), or FSDP2 (fully_shard), which shards parameters, too",
        )
