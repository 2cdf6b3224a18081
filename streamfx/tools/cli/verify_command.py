"""`streamfx verify`: compare one step in eager with the same step through the backend."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from streamfx.progress import show_activity
from streamfx.tools.cli.arguments import NOT_SO, CommandResult, add_model_arguments, check_model, options_of

if TYPE_CHECKING:
    from streamfx.tools.inspect.verify import Verification


def add(subparsers: Any) -> argparse.ArgumentParser:
    """Add the subcommand and its arguments."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "verify",
        help="compare loss and gradients with eager; this runs the model twice",
        description="Runs one training step in eager mode and through the backend, and compares loss and gradients.",
    )
    add_model_arguments(parser, seq=256, dtype="float32")
    return parser


def run(arguments: argparse.Namespace) -> CommandResult:
    """Return the text to print and the exit code."""
    check_model(arguments)
    from streamfx.frontend.gc_pause import resume_gc
    from streamfx.tools.cli.model_lookup import model_and_inputs
    from streamfx.tools.inspect.verify import verify

    model, args, kwargs = model_and_inputs(arguments, "cpu")
    with show_activity("verifying"), resume_gc():  # this runs real steps, so garbage must be collected
        report = verify(model, *args, options=options_of(arguments), **kwargs)
    return CommandResult(json.dumps(summary(report), indent=2) if arguments.json else str(report), 0 if report.ok else NOT_SO)


def summary(report: Verification) -> dict[str, Any]:
    """Return all figures as values that JSON can represent."""
    return {
        "ok": report.ok,
        "max_error": report.max_error,
        "tolerance": report.tolerance,
        "precision": str(report.precision).removeprefix("torch."),
        "loss": report.loss,
        "streamed_loss": report.streamed_loss,
        "loss_error": report.loss_error,
        "errors": report.errors,
    }
