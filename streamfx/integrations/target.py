"""What `enable` compiles: a module, where it was found, and why it is this one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from streamfx.integrations.heads import Head


@dataclass(frozen=True)
class Target:
    """A module to compile.

    Where an engine holds its weights in shards it is a *part*: `owner` is the wrapped module whose hooks gather and free its
    weights, None for weights that are always there. `within_hooks`: those hooks are its own, and stay around its forward.
    """

    name: str
    module: nn.Module
    why: str
    head: Head | None = None
    is_part: bool = False
    owner: nn.Module | None = None
    within_hooks: bool = False
