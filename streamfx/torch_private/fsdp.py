"""Private interfaces of torch's sharded data parallel engines: which modules they wrap, and when weights are freed.

Neither engine is imported here: who has not imported it has wrapped nothing by it.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

FSDP2, FSDP1 = ("torch.distributed.fsdp", "FSDPModule"), ("torch.distributed.fsdp", "FullyShardedDataParallel")
ORIGINAL = "_fsdp_use_orig_params"


def _is_of(module: nn.Module, place: tuple[str, str]) -> bool:
    kind: Any = getattr(sys.modules.get(place[0]), place[1], None)
    return isinstance(kind, type) and isinstance(module, kind)


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` (FSDP2) was called on this very module."""
    return _is_of(module, FSDP2)


def is_fsdp_wrapper(module: nn.Module) -> bool:
    """Whether this is the wrapper that FSDP1 puts around a module."""
    return _is_of(module, FSDP1)


def inside_of_wrapper(wrapper: Any) -> nn.Module:
    """The module that FSDP1's wrapper calls (2.11, 2.13)."""
    return wrapper._fsdp_wrapped_module


def let_trace(module: nn.Module) -> list[nn.Module]:
    """Let Dynamo trace what FSDP1 wraps with `use_orig_params=False`; returns modules that it would refuse (2.11, 2.13).

    Their weights are then views of one flat parameter, set anew in each forward: tensors that a graph takes as any other input.
    The mark is read by Dynamo alone.
    """
    refused = [part for part in module.modules() if part.__dict__.get(ORIGINAL) is False]
    for part in refused:
        part.__dict__[ORIGINAL] = True
    return refused


def refuse_again(modules: list[nn.Module]) -> None:
    """Undo `let_trace`."""
    for part in modules:
        part.__dict__[ORIGINAL] = False


def frees_weights(owner: Any) -> bool:
    """Whether whole weights are freed when the forward of this module or wrapper ends (2.11, 2.13).

    Known once the forward has begun: which module is the root is decided then. What is not known is said to be freed.
    """
    if is_fully_sharded(owner):
        state = owner._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)  # 2.13: several
        groups = [state._fsdp_param_group] if groups is None else groups
        return any(group is not None and group.post_forward_mesh_info is not None for group in groups)
    if is_fsdp_wrapper(owner):
        handle = owner._handle
        keeps = ("SHARD_GRAD_OP", "NO_SHARD", "_HYBRID_SHARD_ZERO2")
        return not (owner._is_root or handle is None or handle._sharding_strategy.name in keeps)
    return True


def is_managed(module: nn.Module) -> bool:
    """Whether either engine holds weights of this module, or of one around it, in shards (2.11, 2.13)."""
    return bool(getattr(module, "_is_fsdp_managed_module", False)) or is_fully_sharded(module) or is_fsdp_wrapper(module)
