"""What of a trainer or a model has to be compiled?

Most trainers call the whole model, and its loss is then part of the graph. Some give the model a forward of their own that calls
the backbone and applies the head by itself, in chunks (`fused_lm_head=True`): there the backbone is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from streamfx.errors import IntegrationError
from streamfx.integrations.heads import Head, head_of
from streamfx.integrations.versions import check_versions
from streamfx.torch_private import is_compiled

ASKED = "streamfx.integrations.enable takes a module, or a trainer that has one"
BESIDE = ("ref_model", "teacher_model")  # frozen models that trainers hold beside the one that is trained
PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)
FABRIC = "_forward_module"  # where Lightning Fabric's wrapper keeps the model
OWN_HEAD = "fused_lm_head"


@dataclass(frozen=True)
class Target:
    """A module to compile, where it was found, and why it is this one."""

    name: str
    module: nn.Module
    why: str
    head: Head | None = None


def targets_of(given: Any) -> list[Target]:
    """The modules to compile, each once."""
    found: dict[nn.Module, Target] = {}
    models = list(_models_of(given))
    check_versions([given, getattr(given, "accelerator", None), *(part for _, model in models for part in model.modules())])
    for name, model in models:
        target = _target(name, _unwrapped(model))
        found.setdefault(target.module, target)
    return list(found.values())


def _models_of(given: Any) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(given, nn.Module):
        yield "model", given
        return
    model = getattr(given, "model", None)
    if not isinstance(model, nn.Module):
        raise IntegrationError(
            ASKED, found=f"a {_described(given)}", do="give the trainer after it was made, or the model itself"
        )
    _check_trainer(given)
    yield "model", model
    for name in BESIDE:
        other = getattr(given, name, None)
        if isinstance(other, nn.Module):
            yield name, other


def _check_trainer(trainer: Any) -> None:
    arguments = getattr(trainer, "args", None)
    if getattr(arguments, "torch_compile", False):
        raise IntegrationError(
            "streamfx.integrations.enable compiles the model, and the trainer was told to do so, too",
            found=f"torch_compile_backend={getattr(arguments, 'torch_compile_backend', None)!r} in {type(arguments).__name__}",
            do="leave torch_compile, torch_compile_backend and torch_compile_mode out of the trainer's arguments",
        )


def _described(given: Any) -> str:
    if isinstance(given, type):
        return f"class ({given.__name__}), not an object of it"
    name = type(given).__name__
    return f"{name}, whose .model is {type(given.model).__name__}" if hasattr(given, "model") else f"{name} without .model"


def _unwrapped(model: nn.Module) -> nn.Module:
    """The module inside of wrappers, which stay around it."""
    if is_compiled(model):
        raise IntegrationError(
            "streamfx.integrations.enable compiles a module in place, and this one is compiled already",
            found="the result of torch.compile(module)",
            do="give the module itself: compiled by a wrapper, it would also be saved with other keys",
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise IntegrationError(
            "streamfx.integrations.enable compiles a module in place, and torch.compile cannot look into this one",
            found=f"a {type(model).__name__} of torch.jit",
            do="give the module that it was scripted or traced from",
        )
    if isinstance(model, PARALLEL):
        return _unwrapped(model.module)
    inner = model._modules.get(FABRIC)
    return model if inner is None else _unwrapped(inner)


def _target(name: str, model: nn.Module) -> Target:
    base: Any = getattr(model, "get_base_model", lambda: model)()
    forward = _forward_with_head(base)
    if forward is None:
        return Target(name, model, "the whole model, with its loss")
    backbone = getattr(base, "base_model", None)
    if not isinstance(backbone, nn.Module) or backbone is base:
        raise IntegrationError(
            "the trainer applies the head itself, so the backbone has to be compiled",
            found=f"{type(base).__name__}.base_model is not a module of its own",
            do="give the module that makes the hidden states: enable(model.<backbone>)",
        )
    inner = next((path for path, module in model.named_modules() if module is backbone), "base_model")
    return Target(f"{name}.{inner}", backbone, "the backbone; the trainer applies the head itself, in chunks", head_of(forward))


def _forward_with_head(model: nn.Module) -> Any:
    """The forward that a trainer has given the model, if it knows the argument for it."""
    function: Any = model.__dict__.get("forward")
    while function is not None:
        function = getattr(function, "__func__", function)
        code = getattr(function, "__code__", None)
        if code is not None and OWN_HEAD in code.co_varnames:
            return function
        function = getattr(function, "__wrapped__", None)
    return None
