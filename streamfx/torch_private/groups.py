"""Private interfaces of torch.distributed: groups by their names, what their backends can do; ranks that are not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

COALESCING = frozenset({("nccl", "cuda"), ("gloo", "cpu"), ("xccl", "xpu"), ("fake", "cpu"), ("fake", "cuda")})  # 2.11, 2.13


def group_called(name: str) -> Any:
    """The process group of this name (2.11, 2.13)."""
    resolve: Any = torch._C._distributed_c10d._resolve_process_group
    return resolve(name)


def takes_several(group: str, device: torch.device) -> bool:
    """Whether a group, by its name, gathers and reduces several tensors of a device in one call (2.11, 2.13)."""
    return (group_called(group)._get_backend(device).name(), device.type) in COALESCING


def ranks_in(group: Any) -> int:
    """How many ranks are in a group, given by its name or as itself (2.11, 2.13)."""
    return dist.get_world_size(group_called(group) if isinstance(group, str) else group)


def members_of(group: Any) -> tuple[int, ...]:
    """The ranks of a group, given by its name or as itself, in order; none of one that is no more (2.11, 2.13)."""
    try:
        found = group_called(group) if isinstance(group, str) else group
        return tuple(sorted(dist.get_process_group_ranks(found)))
    except (RuntimeError, ValueError, KeyError):
        return ()


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
