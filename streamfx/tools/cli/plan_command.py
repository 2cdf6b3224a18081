"""`streamfx plan`: predict which plan fits into memory, and its cost."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from streamfx.budget import format_bytes
from streamfx.errors import PlanError
from streamfx.options import OFFLOADS, SAVE_LEVELS
from streamfx.progress import show_activity
from streamfx.tools.cli.arguments import SEQ_HELP, add_html_argument, token_count, written_as_html
from streamfx.tools.planner.model_names import (
    BACKEND_OPTIONS,
    DEVICES,
    GROUP,
    OBJECTIVES,
    OPTIMIZERS,
    PLAN_ARGUMENTS,
    SCHEMES,
    SHARDS,
    TYPES,
    builtin_names,
    config_file,
)

TABLE_OPTIMIZER = "adamw8bit"
SIZES = "80G and 80GiB are 80 x 2^30 bytes, 80GB are 80 x 10^9, 0.9 and 90%% are a share of the memory of this machine's device"

if TYPE_CHECKING:
    from streamfx.tools.planner.predict import Prediction
    from streamfx.tools.planner.report import PlanReport
    from streamfx.tools.planner.table import LengthTable


def add(subparsers: Any) -> argparse.ArgumentParser:
    """Add the subcommand and its arguments."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "plan",
        help="predict peak memory, FLOPs and the longest sequence of a model, without running it",
        description="Traces a training step of a full-size model without allocating it, and reports what fits and what it costs.",
        epilog=f"shipped configurations: {', '.join(builtin_names())}",
    )
    parser.add_argument(
        "model", help="a Hugging Face configuration: a folder, a JSON file, org/name in the local cache, or a shipped one"
    )
    _add_step(parser)
    _add_devices_and_objective(parser)
    _add_search_and_options(parser)
    add_html_argument(parser)
    beside = "compare with a second plan in the HTML file: the arguments that differ, such as '--keep-every 3'"
    parser.add_argument("--beside", metavar="ARGUMENTS", help=beside)
    parser.set_defaults(parser=parser)
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")
    return parser


def _add_step(parser: argparse.ArgumentParser) -> None:
    """Add the sizes of the step, its memory limits, and what is trained."""
    add = parser.add_argument
    add("--seq", type=token_count, default=4096, metavar="TOKENS", help=f"{SEQ_HELP} (default: %(default)s)")
    add("--batch", type=int, default=1, metavar="N", help="sequences per step and device (default: %(default)s)")
    add("--memory", metavar="SIZE", help=f"memory budget of a device; the plan is then the fastest that fits. {SIZES}")
    add("--host-memory", metavar="SIZE", help="memory for offloaded values on each host of up to 8 devices, such as 1TiB")
    add("--dtype", choices=TYPES, default="bfloat16", help="dtype of parameters (default: %(default)s)")
    add("--lora-rank", type=int, metavar="R", help="train LoRA adapters of this rank instead of all parameters")
    add("--quantize", choices=SCHEMES, help="freeze the model, and store its layers' weights in fewer bits")
    add(
        "--optimizer",
        choices=OPTIMIZERS,
        help=f"optimizer whose state is counted (default: none; with --table {TABLE_OPTIMIZER})",
    )
    add(
        "--optimizer-in-backward",
        action="store_true",
        help="the optimizer updates parameters, and frees gradients, during the backward pass",
    )


def _add_devices_and_objective(parser: argparse.ArgumentParser) -> None:
    """Add the division of the step among devices, and its objective."""
    add = parser.add_argument
    add("--world", type=int, default=1, metavar="N", help="devices that run the step together (default: %(default)s)")
    add("--shard", choices=SHARDS, default=SHARDS[0], help="state that these devices shard (default: %(default)s, no state)")
    add(
        "--tensor",
        type=int,
        default=1,
        metavar="T",
        help="devices that split each layer (tensor parallelism; default: %(default)s)",
    )
    add("--context", type=int, default=1, metavar="C", help="devices that split each sequence (Ulysses; default: %(default)s)")
    add("--objective", choices=OBJECTIVES, default="sft", help="objective of a step (default: %(default)s)")
    add("--group", type=int, default=GROUP, metavar="N", help="answers per prompt, for grpo (default: %(default)s)")


def _add_search_and_options(parser: argparse.ArgumentParser) -> None:
    """Add the searches for the largest size, options of the backend, and the device."""
    add = parser.add_argument
    add("--max-length", action="store_true", help="find the longest sequence that fits into --memory")
    add("--max-batch", action="store_true", help="find the largest batch of --seq that fits into --memory")
    add("--table", action="store_true", help="longest sequences by card (24 to 192 GiB), for all parameters, LoRA and QLoRA")
    add("--frontier", action="store_true", help="also list plans from the smallest peak to the fastest step")
    add("--chunk-size", type=token_count, metavar="ROWS", help="set the option chunk_size instead of planning it")
    add("--loss-chunk-size", type=token_count, metavar="ROWS", help="set the option loss_chunk_size instead of planning it")
    add("--save", choices=SAVE_LEVELS, help="set the option save instead of planning it")
    add("--keep-every", type=int, metavar="K", help="set the option keep_every instead of planning it")
    add(
        "--offload",
        action="append",
        default=[],
        nargs="?",
        const=OFFLOADS[0],
        metavar="VALUES",
        help="keep on the host: inputs of stages (inputs, the default), also attention results (attention), and weights with "
        "their gradients and optimizer state (parameters); several as parameters,inputs",
    )
    add("--device", default="H100", help=f"device to plan for, with its kernels and rates: {', '.join(DEVICES)}, or here")
    add("--no-baselines", action="store_true", help="omit the baselines: eager mode with and without gradient checkpointing")


def run(arguments: argparse.Namespace) -> str:
    """Return the text to print."""
    other = _second_plan(arguments)
    config_file(arguments.model)  # refuse a wrong name before torch is imported
    with written_as_html(arguments) as reports:
        reports += (plans := [_planned(each) for each in (arguments, other) if each is not None])
    if not arguments.json:
        return "\n\n".join(map(str, plans))
    summaries = [report.summary() for report in plans]
    return json.dumps(summaries if other else summaries[0], indent=2)


def _second_plan(arguments: argparse.Namespace) -> argparse.Namespace | None:
    """Return the arguments of the plan to compare with, if any."""
    if arguments.beside is None:
        return None
    if arguments.html is None or arguments.table:
        found = "no --html" if arguments.html is None else "--table"
        raise PlanError("--beside compares two plans in an HTML file", found=found, do="add --html FILE, and omit --table")
    other: argparse.Namespace = arguments.parser.parse_args(
        [arguments.model, *shlex.split(arguments.beside)], argparse.Namespace(**vars(arguments))
    )
    return other


def _planned(arguments: argparse.Namespace) -> PlanReport | LengthTable:
    """Return the plan that the arguments ask for, and show its progress."""
    from streamfx.frontend.gc_pause import pause_gc, resume_gc
    from streamfx.tools.planner.search import MAX_TRACES

    arguments.optimizer = arguments.optimizer or (TABLE_OPTIMIZER if arguments.table else "none")
    searched = arguments.max_length or arguments.max_batch
    collected = resume_gc() if searched or arguments.table else pause_gc()
    with trace_progress(MAX_TRACES if searched else 1) as show_prediction, collected:
        return _plan_for(arguments, show_prediction)


@contextmanager
def trace_progress(max_traces: int) -> Iterator[Callable[[Prediction], None]]:
    """Context manager: show the progress of a plan on a terminal, as `planning 2 of 9 (1 x 4,096 tokens take 5.0 GiB)`.

    Yield a function to call with the prediction of each trace: it shows this prediction, and the number of the next trace.
    """
    trace_number = 1

    def activity() -> str:
        """Return the text before the result: without numbers if there is only one trace."""
        return f"planning {trace_number} of {max_traces}" if max_traces > 1 else "planning"

    with show_activity(activity()) as set_text:

        def show_prediction(prediction: Prediction) -> None:
            """Show the last prediction and the number of the next trace."""
            nonlocal trace_number
            trace_number = min(trace_number + 1, max_traces)
            last_result = f"{prediction.batch:,} x {prediction.length:,} tokens take {format_bytes(prediction.peak_bytes)}"
            set_text(f"{activity()} ({last_result})")

        yield show_prediction


def _plan_for(arguments: argparse.Namespace, show_prediction: Callable[[Prediction], None]) -> PlanReport | LengthTable:
    """Call `streamfx.plan`, or `plan_table`, with the parsed arguments; `show_prediction` is called after each trace."""
    from streamfx.tools.planner.plan import plan, plan_table

    option_values = {name: getattr(arguments, name) for name in BACKEND_OPTIONS if name not in PLAN_ARGUMENTS}
    return (plan_table if arguments.table else plan)(
        arguments.model,
        **{name: getattr(arguments, name) for name in PLAN_ARGUMENTS},
        baselines=not arguments.no_baselines,
        options={name: value for name, value in option_values.items() if value is not None},
        noted=None if arguments.table else show_prediction,
    )
