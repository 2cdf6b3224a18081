"""Private interfaces of torch's activation checkpointing wrapper, which engines put around layers.

The wrapper is not imported here: if it is not imported elsewhere, nothing is wrapped.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from functools import partial
from typing import Any

from torch import nn
from torch.utils import checkpoint

PLACE = ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "CheckpointWrapper")
INNER = "_checkpoint_wrapped_module"


def checkpoints_around(model: nn.Module, inside: Collection[nn.Module]) -> list[nn.Module]:
    """Return the wrappers in a model that run one of these modules by `torch.utils.checkpoint` alone (2.11, 2.13)."""
    kind: Any = getattr(sys.modules.get(PLACE[0]), PLACE[1], None)
    if not isinstance(kind, type):
        return []
    wrappers = [part for part in model.modules() if isinstance(part, kind) and part._modules.get(INNER) in inside]
    return [wrapper for wrapper in wrappers if _is_torch_checkpoint(wrapper.checkpoint_fn)]


def _is_torch_checkpoint(function: Any) -> bool:
    return isinstance(function, partial) and function.func is checkpoint.checkpoint


def run_without(wrapper: Any) -> Any:
    """Let a wrapper call its module without checkpointing; return the argument of `run_with` that undoes it (2.11, 2.13)."""
    kept, wrapper.checkpoint_fn = wrapper.checkpoint_fn, _call
    return kept


def run_with(wrapper: Any, kept: Any) -> None:
    """Undo `run_without`, unless another function was set since."""
    if wrapper.checkpoint_fn is _call:
        wrapper.checkpoint_fn = kept


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)
