"""Arguments that select a model and its inputs. They are parsed and validated before torch is imported."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from streamfx.errors import ModelError
from streamfx.tools.planner.model_names import TYPES, builtin_names, config_file
from streamfx.tools.report.paths import is_there

SOURCES = "a Hugging Face folder, its config.json, org/name in the local cache, a shipped name, or package.module:factory"
EXAMPLE = 'for example {"chunk_size": 1024}'


def add_model_arguments(parser: argparse.ArgumentParser, seq: int, dtype: str) -> None:
    """Add the arguments that select a model and its inputs."""
    shipped = ", ".join(builtin_names())
    parser.add_argument("model", help=f"{SOURCES}, a function that returns a model, or a model and its arguments ({shipped})")
    parser.add_argument("--seq", type=int, default=seq, metavar="TOKENS", help="tokens per sequence (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="sequences per step (default: %(default)s)")
    parser.add_argument("--dtype", choices=[*TYPES, "float64"], default=dtype, help="dtype of parameters (default: %(default)s)")
    parser.add_argument("--layers", type=int, metavar="N", help="only the first N layers of a Hugging Face model")
    parser.add_argument("--options", metavar="JSON", help="options of the backend, for example '{\"chunk_size\": 1024}'")
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")


def options_of(arguments: argparse.Namespace) -> Any:
    """Return the options for the backend, which validates them itself."""
    if arguments.options is None:
        return None
    try:
        return json.loads(arguments.options)
    except json.JSONDecodeError as error:
        raise ModelError("--options must be JSON", found=f"{arguments.options!r}: {error}", do=EXAMPLE) from None


def is_factory(model: str) -> bool:
    """Return whether a name refers to a user's function that builds a model: `package.module:factory`."""
    return ":" in model and not is_there(Path(model))


def check_model(arguments: argparse.Namespace) -> None:
    """Raise an error for an unknown model name before any slow work begins."""
    if not is_factory(arguments.model):
        config_file(arguments.model)
