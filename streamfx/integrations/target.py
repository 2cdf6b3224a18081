"""A module that `enable` compiles, its name, and the reason for the choice."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from streamfx.integrations.heads import HeadModule


@dataclass(frozen=True)
class Target:
    """A module to compile; `why` is the reason in the summary, `head` the trainer's own head whose width is limited, if any.

    If an engine shards its weights, it is a *part*: `owner` is the wrapped module whose hooks gather and free the
    weights, or None if the weights are always available. `is_wrapped` means that the module is wrapped itself;
    `within_hooks` that the hooks are on the module and surround its forward; `is_rest` that it contains wrapped
    modules, whose calls break its graph.
    """

    name: str
    module: nn.Module
    why: str
    head: HeadModule | None = None
    is_part: bool = False
    owner: nn.Module | None = None
    is_wrapped: bool = False
    within_hooks: bool = False
    is_rest: bool = False
