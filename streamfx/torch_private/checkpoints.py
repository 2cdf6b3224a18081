"""Private interfaces of torch's activation checkpointing wrapper, which engines put around layers.

The wrapper is not imported here: if it is not imported elsewhere, nothing is wrapped. "(2.11, 2.13)": the torch versions on
which it was tested.
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
    """Return the checkpoint wrappers in a model that wrap one of `layers` and use torch's own checkpoint function.

    Empty if no code has imported the wrapper class (2.11, 2.13).
    """
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
    """Change a wrapper so that it calls its module without checkpointing.

    Return the checkpoint function that it had, for `restore_checkpointing` (2.11, 2.13).
    """
    checkpoint_fn, wrapper.checkpoint_fn = wrapper.checkpoint_fn, _call_directly
    return checkpoint_fn


def restore_checkpointing(wrapper: Any, checkpoint_fn: Any) -> None:
    """Undo `disable_checkpointing`, which returned `checkpoint_fn`, unless the wrapper was given another function since."""
    if wrapper.checkpoint_fn is _call_directly:
        wrapper.checkpoint_fn = checkpoint_fn


def _call_directly(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function with these arguments: what a wrapper calls in place of `checkpoint(function, *args)`."""
    return function(*args, **kwargs)
