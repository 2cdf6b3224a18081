"""Load the model for a command: from a Hugging Face folder, or from `package.module:factory`."""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from streamfx.argument_checks import require
from streamfx.budget import format_bytes, free_memory
from streamfx.errors import ModelError, describe_error, with_article
from streamfx.tools.cli.arguments import is_factory
from streamfx.tools.cli.lookups import arguments_of
from streamfx.tools.planner.model_names import config_file
from streamfx.tools.planner.models import TYPES, configuration, language_model

COPIES = 3  # of the parameters' bytes that `verify` holds at once: parameters, eager gradients, streamed gradients
RETURN = "let it return a model, or a pair of a model and its arguments (a dictionary or a tuple)"


def model_and_inputs(arguments: argparse.Namespace, device: str) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return the model, its arguments and keyword arguments; `device` may be "meta" if nothing is computed."""
    sizes, layers = f"{arguments.seq} and {arguments.batch}", arguments.layers
    are_valid = arguments.seq >= 2 and arguments.batch >= 1
    require(are_valid, ModelError, "--seq must be 2 or more, and --batch 1 or more", sizes, "")
    require(layers is None or layers >= 1, ModelError, "--layers must be 1 or more", str(layers), "")
    if is_factory(arguments.model):
        do = "omit --layers, and let the function build the model with fewer layers"
        asked = "--layers applies only to Hugging Face configurations"
        require(layers is None, ModelError, asked, f"the function {arguments.model}", do)
        return _from_factory(arguments)
    model = _configured_model(arguments, device)
    ids = torch.zeros(arguments.batch, arguments.seq, dtype=torch.int64, device=device)
    if device != "meta":
        ids = torch.randint(0, model.config.vocab_size, ids.shape, generator=torch.Generator().manual_seed(0))
    return model, (), {"input_ids": ids, "labels": ids, "use_cache": False}


def _configured_model(arguments: argparse.Namespace, device: str) -> Any:
    """Return the model of a configuration: with its weights if the folder has them and no `--layers` is given."""
    config = configuration(arguments.model)
    config = getattr(config, "get_text_config", lambda: config)()
    if arguments.layers is not None:
        _truncate_layers(config, arguments.layers)
    dtype = {**TYPES, "float64": torch.float64}[arguments.dtype]
    folder = config_file(arguments.model).parent
    if device != "meta":
        _check_host_memory(language_model(config, dtype, "meta"))
    if device != "meta" and arguments.layers is None and any(folder.glob("*.safetensors")):
        return _pretrained_model(folder, dtype)
    torch.manual_seed(0)
    return language_model(config, dtype, device)


def _truncate_layers(config: Any, layers: int) -> None:
    """Truncate a configuration to its first layers."""
    layer_count = getattr(config, "num_hidden_layers", None)
    found, do = "it has no num_hidden_layers", "omit --layers"
    if isinstance(layer_count, int):
        found, do = f"it has {layer_count}", f"give a number from 1 to {layer_count}, or omit --layers"
    is_fewer = isinstance(layer_count, int) and layers <= layer_count
    require(is_fewer, ModelError, f"--layers {layers} must not exceed the layers of the configuration", found, do)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]


def _check_host_memory(model: torch.nn.Module) -> None:
    """Raise an error if the parameters and the gradients of two runs do not fit into host memory."""
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    needed, free = COPIES * parameters, free_memory(torch.device("cpu"))
    do = "give fewer --layers, or a --dtype of fewer bytes; `streamfx explain` allocates no such memory"
    size = format_bytes(parameters)
    asked = f"this command runs the model: {size} of parameters, and as many of gradients in each of two runs"
    found = f"{format_bytes(needed)} needed, without activations, {format_bytes(max(0, free))} free"
    require(needed <= free, ModelError, asked, found, do)


def _pretrained_model(folder: Path, dtype: torch.dtype) -> Any:
    """Load the model of a folder with its weights."""
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).train()
    except Exception as error:
        do = "check the weights, or use --layers: a model with fewer layers gets random weights"
        raise ModelError(f"the model in {folder} cannot be loaded", found=describe_error(error), do=do) from error


def _from_factory(arguments: argparse.Namespace) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Call a factory and return its result: a model called with ids and labels, or a model with its arguments."""
    module_name, _, name = arguments.model.partition(":")
    working_directory = str(Path.cwd())
    if working_directory not in sys.path:
        sys.path.insert(0, working_directory)
    try:
        factory = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        do = "write package.module:factory; the module must be importable from the current folder"
        raise ModelError(f"cannot find {arguments.model!r}", found=str(error), do=do) from None
    except Exception as error:
        do = f"python -c 'import {module_name}' shows the traceback"
        raise ModelError(
            f"{module_name} cannot be imported", found=describe_error(error), where=place_of(error), do=do
        ) from error
    asked = f"{arguments.model} must be a function that returns a model"
    require(callable(factory), ModelError, asked, with_article(type(factory).__name__), RETURN)
    try:
        result = factory if isinstance(factory, torch.nn.Module) else factory()
    except Exception as error:
        do = "call it in Python without arguments"
        raise ModelError(
            f"{arguments.model} failed to build a model", found=describe_error(error), where=place_of(error), do=do
        ) from error
    return _model_and_arguments(arguments, result)


def _model_and_arguments(
    arguments: argparse.Namespace, result: Any
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return (model, arguments, keyword arguments) for the result of a user's factory.

    The result is a pair (model, its arguments as a dictionary, tuple, or list), or a model: then `arguments_of` supplies
    random ids. Raises `ModelError` for other results.
    """
    if isinstance(result, tuple) and len(result) == 2 and callable(result[0]) and isinstance(result[1], (Mapping, tuple, list)):
        model, model_arguments = result
        return (model, (), dict(model_arguments)) if isinstance(model_arguments, Mapping) else (model, tuple(model_arguments), {})
    type_text = type(result).__name__
    if isinstance(result, tuple):
        type_text = f"a tuple of {', '.join(type(item).__name__ for item in result)}"
    require(callable(result), ModelError, f"{arguments.model} must be a function that returns a model", type_text, RETURN)
    return result, *arguments_of(result, arguments.model, arguments.batch, arguments.seq)


def place_of(error: BaseException) -> str:
    """Return the file and line that raised an error."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
