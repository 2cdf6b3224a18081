"""Private interfaces of torch.distributed: how many ranks a group has that is known by name; ranks that are not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist


def ranks_in(group: Any) -> int:
    """How many ranks are in a group, given by its name or as itself (2.11, 2.13)."""
    return dist.get_world_size(_called(group) if isinstance(group, str) else group)


def _called(name: Any) -> Any:
    from torch.distributed import distributed_c10d

    return distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined]  # 2.11, 2.13


@contextmanager
def imagined_ranks(world: int, rank: int = 0) -> Iterator[None]:
    """So many ranks of which only this one is there: collectives give results of the right sizes (2.11, 2.13)."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # 2.11, 2.13: also defines the backend

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def has_ranks() -> bool:
    """Whether this process belongs to a group already."""
    return dist.is_available() and dist.is_initialized()
