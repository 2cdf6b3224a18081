"""`streamfx compare`: memory and time of a step in eager mode, with gradient checkpointing, and through the backend."""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import Any

from streamfx.tools.cli.arguments import NOT_SO, CommandResult, add_model_arguments, check_model, options_of


def add(subparsers: Any) -> argparse.ArgumentParser:
    """Add the subcommand and its arguments."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "compare",
        help="measure memory and time beside eager and gradient checkpointing; this runs the model",
        description="Runs training steps in eager mode, with gradient checkpointing, and through the backend, each in a process "
        "of its own, and compares memory, time, loss and gradients.",
    )
    add_model_arguments(parser, seq=4096, dtype="float32")
    parser.add_argument("--steps", type=int, default=2, metavar="N", help="steps of each way (default: %(default)s)")
    return parser


def run(arguments: argparse.Namespace) -> CommandResult:
    """Return the text to print and the exit code."""
    check_model(arguments)
    from streamfx.options import validate_options
    from streamfx.tools.inspect.compare import compare_call

    options = validate_options(options_of(arguments), "--options")
    found = compare_call(partial(built, arguments), options, steps=arguments.steps)
    return CommandResult(json.dumps(found.summary(), indent=2) if arguments.json else str(found), 0 if found.ok else NOT_SO)


def built(arguments: argparse.Namespace) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return the model, its arguments and keyword arguments, on the GPU if there is one; each process calls this."""
    import torch

    from streamfx.tools.cli.model_lookup import model_and_inputs
    from streamfx.torch_private import tree_map

    model, args, kwargs = model_and_inputs(arguments, "cpu")
    if torch.cuda.is_available() and isinstance(model, torch.nn.Module):
        model = model.cuda()
        args, kwargs = tree_map(lambda value: value.cuda() if isinstance(value, torch.Tensor) else value, (args, kwargs))
    return model, args, kwargs
