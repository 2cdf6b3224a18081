"""What `enable` compiles: a module, where it was found, and why it is this one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from streamfx.integrations.heads import Head


@dataclass(frozen=True)
class Target:
    """A module to compile.

    Where an engine holds its weights in shards it is a *part*: `owner` is the wrapped module whose hooks gather and free its
    weights, None for weights that are always there. `is_wrapped`: the hooks are its own; `within_hooks`: they are on it, and
    stay around its forward.
    `is_rest`: it holds wrapped modules, at whose calls its graph is cut.
    """

    name: str
    module: nn.Module
    why: str
    head: Head | None = None
    is_part: bool = False
    owner: nn.Module | None = None
    is_wrapped: bool = False
    within_hooks: bool = False
    is_rest: bool = False
