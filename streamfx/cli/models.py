"""What the commands look at: a Hugging Face folder, or `package.module:factory`."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from streamfx.errors import ModelError
from streamfx.planner.models import TYPES, builtin_names, configuration

SOURCES = "a Hugging Face folder, its config.json, the name of a shipped configuration, or package.module:factory"


def add_model_arguments(parser: argparse.ArgumentParser, seq: int, dtype: str) -> None:
    """The arguments that say which model is called, and how."""
    shipped = ", ".join(builtin_names())
    parser.add_argument("model", help=f"{SOURCES}, a function that returns a model, or a model and its arguments ({shipped})")
    parser.add_argument("--seq", type=int, default=seq, metavar="TOKENS", help="length of a sequence (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="sequences of a step (default: %(default)s)")
    parser.add_argument("--dtype", choices=[*TYPES, "float64"], default=dtype, help="type of parameters (default: %(default)s)")
    parser.add_argument("--layers", type=int, metavar="N", help="only so many layers of a Hugging Face model")
    parser.add_argument("--options", metavar="JSON", help="options of the backend, for example '{\"chunk_size\": 1024}'")
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")


def options_of(arguments: argparse.Namespace) -> Any:
    """The backend's options, which it checks itself."""
    if arguments.options is None:
        return None
    try:
        return json.loads(arguments.options)
    except json.JSONDecodeError as error:
        raise ModelError("--options must be JSON", found=f"{arguments.options!r}: {error}", do='{"chunk_size": 1024}') from None


def model_and_inputs(arguments: argparse.Namespace, device: str) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The model and what to call it with; `device` may be "meta" where nothing is computed."""
    if arguments.seq < 2 or arguments.batch < 1:
        raise ModelError("--seq is 2 or more and --batch 1 or more", found=f"{arguments.seq} and {arguments.batch}")
    if ":" in arguments.model and not Path(arguments.model).exists():
        return _from_factory(arguments)
    model = _hugging_face(arguments, device)
    ids = torch.zeros(arguments.batch, arguments.seq, dtype=torch.int64, device=device)
    if device != "meta":
        ids = torch.randint(0, model.config.vocab_size, ids.shape, generator=torch.Generator().manual_seed(0))
    return model, (), {"input_ids": ids, "labels": ids, "use_cache": False}


def _hugging_face(arguments: argparse.Namespace, device: str) -> Any:
    from transformers import AutoModelForCausalLM

    config = configuration(arguments.model)
    config = getattr(config, "get_text_config", lambda: config)()
    if arguments.layers is not None:
        config.num_hidden_layers = arguments.layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: arguments.layers]
    dtype = {**TYPES, "float64": torch.float64}[arguments.dtype]
    folder = Path(arguments.model)
    if device != "meta" and arguments.layers is None and folder.is_dir() and any(folder.glob("*.safetensors")):
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).train()
    torch.manual_seed(0)
    with torch.device(device):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.train()


def _from_factory(arguments: argparse.Namespace) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """What a function returns: a model that is called with ids and labels, or a pair of a model and its arguments."""
    module_name, _, name = arguments.model.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        factory = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        do = "write package.module:factory, where the module can be imported from here"
        raise ModelError(f"there is no {arguments.model!r}", found=str(error), do=do) from None
    made = factory()
    if isinstance(made, tuple) and len(made) == 2:
        model, given = made
        return (model, (), dict(given)) if isinstance(given, Mapping) else (model, tuple(given), {})
    if not callable(made):
        do = "let it return a model, or a pair of a model and its arguments (a dictionary or a tuple)"
        raise ModelError(f"{arguments.model} is a function that returns a model", found=type(made).__name__, do=do)
    vocabulary = getattr(getattr(made, "config", None), "vocab_size", None)
    if vocabulary is None:
        do = "return (model, {...}) with the arguments of the call: this model has no config.vocab_size to draw ids from"
        raise ModelError(f"{arguments.model} returned a model without arguments", found=type(made).__name__, do=do)
    ids = torch.randint(0, vocabulary, (arguments.batch, arguments.seq), generator=torch.Generator().manual_seed(0))
    return made, (), {"input_ids": ids, "labels": ids}
