"""Find the engine that has wrapped a model, and the modules in it that can be compiled.

Engines are looked up in `sys.modules`, never imported: one that is not imported has wrapped nothing.

    DistributedDataParallel, DataParallel    the wrapped module
    DeepSpeedEngine                          its `.module`; not with ZeRO-3, which puts hooks on every module
    FSDP2 (`fully_shard`)                    each wrapped module's forward, inside of its hooks
    FSDP1 (FullyShardedDataParallel)         each module inside of a wrapper
    parameters that are sharded tensors      the full model

If an engine shards weights, a *target* (module to compile) is a *part*: a module that the engine has wrapped, or one inside of
it. A wrapped module that contains other wrapped ones is the *rest*: its operators outside of these. The *owner* of a part is
the wrapped module whose hooks gather and free its weights.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from streamfx.distributed.zero_3 import is_partitioned, refuse_partitioned
from streamfx.integrations.target import Target
from streamfx.torch_private import is_sharded
from streamfx.torch_private.fsdp import (
    is_fsdp_wrapper,
    is_fully_sharded,
    is_managed,
    unwrap_fsdp,
)

DEEPSPEED = ("deepspeed.runtime.engine", "DeepSpeedEngine")
DATA_PARALLEL = "DistributedDataParallel: its buckets do not split the graph (optimize_ddp=False during its calls)"
CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # without a forward
WRAPPED = "a wrapped module"
REST = "its operators outside the wrapped modules"
PART = "a part of a module whose graph is split at wrapped modules"
FABRIC = "_forward_module"  # the submodule name of the model in Lightning Fabric's wrapper


def unwrap_engine(model: nn.Module) -> tuple[nn.Module, str] | None:
    """Return the module inside of a data-parallel, DeepSpeed or Fabric wrapper, and a description of the wrapper.

    The wrapper is not compiled. None if the model is not such a wrapper.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return model.module, DATA_PARALLEL
    if isinstance(model, nn.DataParallel):
        return model.module, "DataParallel"
    engine: Any = getattr(sys.modules.get(DEEPSPEED[0]), DEEPSPEED[1], None)
    if isinstance(engine, type) and isinstance(model, engine):
        return model.get_submodule("module"), "DeepSpeedEngine"
    inner = model._modules.get(FABRIC)
    return None if inner is None else (inner, f"a wrapper of {type(model).__module__.partition('.')[0]}")


def check_engine(model: nn.Module) -> None:
    """Raise `IntegrationError` if DeepSpeed ZeRO-3 has partitioned the weights: its hooks on every module break graphs."""
    refuse_partitioned(model.parameters())


def is_sharded_by_engine(model: nn.Module, with_parts: bool = False) -> bool:
    """Return whether an engine shards a model's weights; `with_parts` also checks its submodules and all parameters."""
    modules = model.modules() if with_parts else (model,)
    return any(map(is_managed, modules)) or any(map(is_partitioned, _first_or_all(model, with_parts)))


def _first_or_all(model: nn.Module, wants_all: bool) -> Iterator[nn.Parameter]:
    """Yield the parameters of a model: all of them, or only the first."""
    for parameter in model.parameters():
        yield parameter
        if not wants_all:
            return


def engine_of(model: nn.Module) -> str:
    """Describe the engine that shards a model's weights, for the summary; "" if no engine does."""
    wrapped = sum(map(is_fully_sharded, model.modules()))
    if wrapped:
        return (
            f"FSDP2 (fully_shard): {wrapped} wrapped modules, each a separate graph inside its hooks; values between modules are "
            "saved, as with checkpointing, so keep_every applies within each module"
        )
    wrapped = sum(map(is_fsdp_wrapper, model.modules()))
    if wrapped:
        return f"FSDP1 (FullyShardedDataParallel): {wrapped} wrapped modules, each a separate graph"
    if any(map(is_sharded, model.parameters())):
        return "parameters that are sharded tensors (DTensor): their collectives run outside the loops of one graph"
    return ""


def parts_of(target: Target, owner: nn.Module | None) -> list[Target]:
    """Return the targets in place of a target whose weights an engine shards: itself first, then the wrapped modules inside.

    `owner` is the wrapped module that owns the weights of the target, if it is not the target itself.
    """
    outer_target, *inner_targets = _targets_inside(target.name, target.module, owner, is_top=True)
    return [replace(outer_target, head=target.head), *inner_targets]


def _targets_inside(path: str, module: nn.Module, owner: nn.Module | None, is_top: bool = False) -> Iterator[Target]:
    """Yield the module itself as a target, if it is wrapped, at the top, or contains no wrapped module; then those inside it.

    `path` is its name; `owner` is the wrapped module around it whose hooks gather its weights.
    """
    if is_fsdp_wrapper(module):
        yield from _targets_inside(path, unwrap_fsdp(module), module, is_top=True)
        return
    has_hooks = is_fully_sharded(module)
    # A managed module without a known wrapper counts as its own owner.
    owner = module if has_hooks or (owner is None and is_managed(module)) else owner
    holds_wrapped = _holds_wrapped(module)
    if has_hooks or is_top or not (holds_wrapped or isinstance(module, CONTAINERS)):
        target = Target(path, module, PART, is_part=True, owner=owner, within_hooks=has_hooks)
        if has_hooks or is_top:
            target = replace(target, why=REST if holds_wrapped else WRAPPED, is_wrapped=True, is_rest=holds_wrapped)
        yield target
    if holds_wrapped or isinstance(module, CONTAINERS):
        for name, child in module.named_children():
            yield from _targets_inside(f"{path}.{name}", child, owner)


def _holds_wrapped(module: nn.Module) -> bool:
    """Return whether FSDP wraps any submodule of a module, itself excluded."""
    return any(
        is_fully_sharded(submodule) or is_fsdp_wrapper(submodule) for submodule in module.modules() if submodule is not module
    )
