"""`streamfx explain`: report which parts of a model stream, and its memory and FLOPs, without running it."""

from __future__ import annotations

import argparse
import json
from typing import Any

from streamfx.progress import show_activity
from streamfx.tools.cli.arguments import (
    NOT_SO,
    CommandResult,
    add_html_argument,
    add_model_arguments,
    check_model,
    options_of,
    written_as_html,
)


def add(subparsers: Any) -> argparse.ArgumentParser:
    """Add the subcommand and its arguments."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "explain",
        help="show which parts of a model stream, and why others do not, without running it",
        description="Traces one training step on the meta device and reports how the backend would run it.",
    )
    add_model_arguments(parser, seq=4096, dtype="bfloat16")
    add_html_argument(parser)
    parser.add_argument("--strict", action="store_true", help=f"exit code {NOT_SO} if any operator falls back")
    return parser


def run(arguments: argparse.Namespace) -> CommandResult:
    """Return the text to print and the exit code."""
    check_model(arguments)
    from streamfx.tools.cli.model_lookup import model_and_inputs
    from streamfx.tools.inspect.explain import explain

    with written_as_html(arguments) as reports:
        model, args, kwargs = model_and_inputs(arguments, "meta")
        with show_activity("explaining"):
            report = explain(model, *args, options=options_of(arguments), **kwargs)
            summary = report.summary()
        reports.append(report)
    has_fallback = any(stage["kind"] == "whole" for stage in summary["stages"]) or not summary["stages"]
    text = json.dumps(summary, indent=2) if arguments.json else str(report)
    return CommandResult(text, NOT_SO if arguments.strict and has_fallback else 0)
