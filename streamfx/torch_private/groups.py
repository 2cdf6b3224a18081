"""Private interfaces of torch.distributed: process groups by name, features of their backends, and simulated ranks.

"(2.11, 2.13)": the torch versions on which it was tested.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

# (backend of a group, device type) for which one collective call can take several tensors (2.11, 2.13)
COALESCING = frozenset({("nccl", "cuda"), ("gloo", "cpu"), ("xccl", "xpu"), ("fake", "cpu"), ("fake", "cuda")})


def group_by_name(name: str) -> Any:
    """Return the process group with this name (2.11, 2.13)."""
    resolve: Any = torch._C._distributed_c10d._resolve_process_group
    return resolve(name)


def supports_coalescing(group: str, device: torch.device) -> bool:
    """Return whether a group can gather and reduce several tensors of a device in one call (2.11, 2.13)."""
    return (group_by_name(group)._get_backend(device).name(), device.type) in COALESCING


def ranks_in(group: Any) -> int:
    """Return the number of ranks in a group, passed by name or as an object (2.11, 2.13)."""
    return dist.get_world_size(group_by_name(group) if isinstance(group, str) else group)


def members_of(group: Any) -> tuple[int, ...]:
    """Return the ranks of a group in order, passed by name or as an object; empty if it no longer exists (2.11, 2.13)."""
    try:
        process_group = group_by_name(group) if isinstance(group, str) else group
        return tuple(sorted(dist.get_process_group_ranks(process_group)))
    except (RuntimeError, ValueError, KeyError):
        return ()


@contextmanager
def simulated_ranks(world: int, rank: int = 0) -> Iterator[None]:
    """Context manager: simulate a process group of `world` ranks, of which this process is `rank` and no other exists.

    Collectives return results of the right sizes, with arbitrary values. No group may exist before (2.11, 2.13).
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # 2.11, 2.13: also defines the backend

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def has_ranks() -> bool:
    """Return whether torch.distributed is initialized in this process."""
    return dist.is_available() and dist.is_initialized()
