"""Private interfaces of torch's sharded data parallel engines: which modules they wrap, and when they free weights.

FSDP1 (`FullyShardedDataParallel`) wraps modules; FSDP2 (`fully_shard`) changes their class. Neither is imported here: if it is
not imported elsewhere, nothing is wrapped. "(2.11, 2.13)": the torch versions on which it was tested.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

FSDP2, FSDP1 = ("torch.distributed.fsdp", "FSDPModule"), ("torch.distributed.fsdp", "FullyShardedDataParallel")
ORIGINAL = "_fsdp_use_orig_params"


def _is_instance(module: nn.Module, class_path: tuple[str, str]) -> bool:
    """Return whether a module is an instance of a class, given as (module name, class name); False if it is not imported."""
    cls: Any = getattr(sys.modules.get(class_path[0]), class_path[1], None)
    return isinstance(cls, type) and isinstance(module, cls)


def is_fully_sharded(module: nn.Module) -> bool:
    """Return whether `fully_shard` (FSDP2) was applied to this module itself, not to a parent."""
    return _is_instance(module, FSDP2)


def is_fsdp_wrapper(module: nn.Module) -> bool:
    """Return whether this is FSDP1's wrapper of a module."""
    return _is_instance(module, FSDP1)


def unwrap_fsdp(wrapper: Any) -> nn.Module:
    """Return the module that FSDP1's wrapper calls (2.11, 2.13)."""
    return wrapper._fsdp_wrapped_module


def allow_tracing(module: nn.Module) -> list[nn.Module]:
    """Change modules that FSDP1 wraps with `use_orig_params=False`, so that Dynamo traces them; return them (2.11, 2.13).

    Dynamo refuses them by an attribute that nothing else reads; it is set to True. Their weights are views of one flat
    parameter, set in each forward, and can be inputs of a graph like any other tensors.
    """
    refused = [submodule for submodule in module.modules() if submodule.__dict__.get(ORIGINAL) is False]
    for submodule in refused:
        submodule.__dict__[ORIGINAL] = True
    return refused


def restore_tracing_refusal(modules: list[nn.Module]) -> None:
    """Undo `allow_tracing`, which returned `modules`: Dynamo refuses them again."""
    for module in modules:
        module.__dict__[ORIGINAL] = False


def frees_weights(owner: Any) -> bool:
    """Return whether the full weights, gathered from all ranks, are freed when the forward of this module ends.

    `owner`: an FSDP2 module or an FSDP1 wrapper; True for any other. By default, the root module keeps its weights until
    backward. FSDP determines the root when the forward starts, so the answer is reliable only after that (2.11, 2.13).
    """
    if is_fully_sharded(owner):
        state = owner._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)  # 2.13: a list
        groups = [state._fsdp_param_group] if groups is None else groups
        return any(group is not None and group.post_forward_mesh_info is not None for group in groups)
    if is_fsdp_wrapper(owner):
        handle = owner._handle
        keeping_strategies = ("SHARD_GRAD_OP", "NO_SHARD", "_HYBRID_SHARD_ZERO2")
        return not (owner._is_root or handle is None or handle._sharding_strategy.name in keeping_strategies)
    return True


def is_managed(module: nn.Module) -> bool:
    """Return whether either engine shards weights of this module, or of a module around it (2.11, 2.13)."""
    return bool(getattr(module, "_is_fsdp_managed_module", False)) or is_fully_sharded(module) or is_fsdp_wrapper(module)
