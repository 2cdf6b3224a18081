"""Private interfaces of torch.distributed: how many ranks a group has, which a collective knows by name."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def ranks_in(group: Any) -> int:
    """How many ranks are in a group, given by its name or as itself (2.11, 2.13)."""
    return dist.get_world_size(_called(group) if isinstance(group, str) else group)


def _called(name: Any) -> Any:
    from torch.distributed import distributed_c10d

    return distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined]  # 2.11, 2.13
