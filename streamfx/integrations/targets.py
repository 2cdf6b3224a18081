"""Find the modules of a trainer or a model that must be compiled.

Most trainers call the full model, and the loss is part of the graph. Some replace the model's forward by one that calls the
backbone and applies the head itself, in chunks (`fused_lm_head=True`): then the backbone is compiled. A *target* is a module to
compile. *Engines* (DDP, FSDP, DeepSpeed) wrap models; if one shards the weights, each wrapped module is a separate target.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from streamfx.errors import IntegrationError, with_article
from streamfx.integrations.engines import check_engine, engine_of, is_sharded_by_engine, parts_of, unwrap_engine
from streamfx.integrations.heads import find_head
from streamfx.integrations.minimum_versions import check_versions
from streamfx.integrations.target import Target
from streamfx.tools.inspect.layers import has_forward
from streamfx.torch_private.dynamo import is_compiled
from streamfx.torch_private.fsdp import is_fsdp_wrapper, unwrap_fsdp

REQUIREMENT = "streamfx.{name} takes a module, or a trainer that has one"
NO_FORWARD = "give a module that calls this one, or define forward"
FROZEN_MODELS = ("ref_model", "teacher_model")  # attributes of trainers
OF_MODULE = "its forward, and the loss if the forward computes it"
OF_TRAINER = "the full model, and the loss if its forward computes it"
OWN_HEAD = "fused_lm_head"


@dataclass(frozen=True)
class CompileTargets:
    """The modules to compile, without duplicates, and descriptions of the engines that hold them."""

    targets: list[Target]
    engines: list[str]


def find_targets(model_or_trainer: Any) -> CompileTargets:
    """Return the modules of a model, or of a trainer and its frozen models, that must be compiled.

    Raise `IntegrationError` if there are none, if they are compiled already, or if a library is too old.
    """
    targets: dict[nn.Module, Target] = {}
    engines: dict[str, None] = {}
    if not isinstance(model_or_trainer, nn.Module):
        _check_trainer(model_or_trainer)
    models = list(models_of(model_or_trainer))
    check_versions(
        [
            model_or_trainer,
            getattr(model_or_trainer, "accelerator", None),
            *(module for _, model in models for module in model.modules()),
        ]
    )
    for name, model in models:
        inner, wrappers = _unwrapped(model)
        check_engine(inner)
        engines |= dict.fromkeys(filter(None, (*wrappers, engine_of(inner))))
        target = _target_of_model(name, inner, is_given_alone=isinstance(model_or_trainer, nn.Module))
        target_parts = [target]
        if is_sharded_by_engine(inner, with_parts=True):
            owner = inner if is_sharded_by_engine(inner) and target.module is not inner else None
            target_parts = parts_of(target, owner)
        for target_part in target_parts:
            targets.setdefault(target_part.module, target_part)
    return CompileTargets(list(targets.values()), list(engines))


def models_of(model_or_trainer: Any, caller: str = "enable") -> Iterator[tuple[str, nn.Module]]:
    """Yield ("model", model), and for a trainer also its frozen models, such as ("ref_model", model).

    Raise `IntegrationError` if the object is neither a module nor a trainer with one; `caller` is the public function in its
    text.
    """
    if isinstance(model_or_trainer, nn.Module):
        yield "model", model_or_trainer
        return
    model = getattr(model_or_trainer, "model", None)
    if not isinstance(model, nn.Module):
        raise IntegrationError(
            REQUIREMENT.format(name=caller),
            found=_describe_object(model_or_trainer),
            do="give a constructed trainer, or the model itself",
        )
    yield "model", model
    for name in FROZEN_MODELS:
        frozen_model = getattr(model_or_trainer, name, None)
        if isinstance(frozen_model, nn.Module):
            yield name, frozen_model


def _check_trainer(trainer: Any) -> None:
    """Raise `IntegrationError` if the trainer is configured to compile the model itself."""
    arguments = getattr(trainer, "args", None)
    if getattr(arguments, "torch_compile", False):
        raise IntegrationError(
            "streamfx.enable compiles the model, but the trainer is configured to compile it, too",
            found=f"torch_compile_backend={getattr(arguments, 'torch_compile_backend', None)!r} in {type(arguments).__name__}",
            do="remove torch_compile, torch_compile_backend and torch_compile_mode from the trainer's arguments",
        )


def _describe_object(model_or_trainer: Any) -> str:
    """Describe an object that is neither a module nor a trainer with a module, for an error."""
    if isinstance(model_or_trainer, type):
        return f"a class ({model_or_trainer.__name__}), not an instance"
    name = with_article(type(model_or_trainer).__name__)
    return (
        f"{name}, whose .model is {type(model_or_trainer.model).__name__}"
        if hasattr(model_or_trainer, "model")
        else f"{name} without .model"
    )


def _unwrapped(model: nn.Module) -> tuple[nn.Module, list[str]]:
    """Return the module inside of all wrappers (DDP, DeepSpeed, Fabric), and the descriptions of the wrappers.

    Raise `IntegrationError` if it cannot be compiled in place: it is compiled already, scripted, or has no forward.
    """
    if is_compiled(model):
        raise IntegrationError(
            "streamfx.enable compiles a module in place, but this one is already compiled",
            found="the result of torch.compile(module)",
            do="give the module itself: the wrapper would also change the keys of its state_dict",
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise IntegrationError(
            "streamfx.enable compiles a module in place, but torch.compile cannot trace this one",
            found=f"{with_article(type(model).__name__)} of torch.jit",
            do="give the module from which it was scripted or traced",
        )
    if not has_forward(model):
        found = f"{with_article(type(model).__name__)} that has no forward, so it cannot be called"
        raise IntegrationError("streamfx.enable compiles the forward of a module", found=found, do=NO_FORWARD)
    wrapper = unwrap_engine(model)
    if wrapper is None:
        return model, []
    wrapped_module, description = wrapper
    inner, wrappers = _unwrapped(wrapped_module)
    return inner, [description, *wrappers]


def _target_of_model(name: str, model: nn.Module, is_given_alone: bool) -> Target:
    """Return the module of a model to compile, with its name: the model, or its backbone if a trainer applies the head itself.

    `is_given_alone`: the caller gave a module, not a trainer. Raise `IntegrationError` if the backbone is not a separate module.
    """
    base: Any = unwrap_fsdp(model) if is_fsdp_wrapper(model) else model
    base = getattr(base, "get_base_model", lambda: base)()
    forward = _forward_with_head(base)
    if forward is None:
        return Target(name, model, OF_MODULE if is_given_alone else OF_TRAINER)
    backbone = getattr(base, "base_model", None)
    if not isinstance(backbone, nn.Module) or backbone is base:
        raise IntegrationError(
            "the trainer applies the head itself, so streamfx compiles the backbone",
            found=f"{type(base).__name__}.base_model is not a separate module",
            do="give the module that computes the hidden states: enable(model.<backbone>)",
        )
    path_of_backbone = next((path for path, module in model.named_modules() if module is backbone), "base_model")
    return Target(
        f"{name}.{path_of_backbone}", backbone, "the backbone; the trainer applies the head itself, in chunks", find_head(forward)
    )


def _forward_with_head(model: nn.Module) -> Any:
    """Return the forward that a trainer has set on the model, if it applies the trainer's own head; else None.

    Such a forward has the argument `fused_lm_head`, itself or inside of wrappers (`__wrapped__`).
    """
    function: Any = model.__dict__.get("forward")
    while function is not None:
        function = getattr(function, "__func__", function)
        code = getattr(function, "__code__", None)
        if code is not None and OWN_HEAD in code.co_varnames:
            return function
        function = getattr(function, "__wrapped__", None)
    return None
