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

WRAPPER_CLASS = ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "CheckpointWrapper")
WRAPPED_MODULE = "_checkpoint_wrapped_module"


def checkpoints_around(model: nn.Module, layers: Collection[nn.Module]) -> list[nn.Module]:
    """Return the wrappers in a model that run one of these modules with torch's own checkpoint function (2.11, 2.13)."""
    wrapper_class: Any = getattr(sys.modules.get(WRAPPER_CLASS[0]), WRAPPER_CLASS[1], None)
    if not isinstance(wrapper_class, type):
        return []
    wrappers = [
        module
        for module in model.modules()
        if isinstance(module, wrapper_class) and module._modules.get(WRAPPED_MODULE) in layers
    ]
    return [wrapper for wrapper in wrappers if _is_torch_checkpoint(wrapper.checkpoint_fn)]


def _is_torch_checkpoint(function: Any) -> bool:
    """Return whether a function is `torch.utils.checkpoint.checkpoint` with some arguments set."""
    return isinstance(function, partial) and function.func is checkpoint.checkpoint


def disable_checkpointing(wrapper: Any) -> Any:
    """Make a wrapper call its module without checkpointing; return its function for `restore_checkpointing` (2.11, 2.13)."""
    checkpoint_fn, wrapper.checkpoint_fn = wrapper.checkpoint_fn, _call_directly
    return checkpoint_fn


def restore_checkpointing(wrapper: Any, checkpoint_fn: Any) -> None:
    """Undo `disable_checkpointing`, unless another function was set after it."""
    if wrapper.checkpoint_fn is _call_directly:
        wrapper.checkpoint_fn = checkpoint_fn


def _call_directly(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function as `checkpoint` would, but without checkpointing."""
    return function(*args, **kwargs)
