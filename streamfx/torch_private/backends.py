"""Private interfaces of torch.distributed: what the backend of a process group can do."""

from __future__ import annotations

from typing import Any

import torch

COALESCING = frozenset({("nccl", "cuda"), ("gloo", "cpu"), ("xccl", "xpu"), ("fake", "cpu"), ("fake", "cuda")})  # 2.11, 2.13


def takes_several(group: str, device: torch.device) -> bool:
    """Whether a group, by its name, gathers and reduces several tensors of a device in one call (2.11, 2.13)."""
    resolve: Any = torch._C._distributed_c10d._resolve_process_group  # 2.11, 2.13
    return (resolve(group)._get_backend(device).name(), device.type) in COALESCING
