"""`streamfx plan`: predict which plan fits into memory, and its cost."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from streamfx.budget import format_bytes
from streamfx.options import OFFLOADS, SAVE_LEVELS
from streamfx.progress import show_activity
from streamfx.tools.cli.html_option import add_html_argument, written_as_html
from streamfx.tools.planner.model_names import (
    DEVICES,
    GROUP,
    OBJECTIVES,
    OPTIMIZERS,
    SCHEMES,
    SHARDS,
    TYPES,
    builtin_names,
    config_file,
)

if TYPE_CHECKING:
    from streamfx.tools.planner.predict import Prediction
    from streamfx.tools.planner.report import PlanReport


def add(subparsers: Any) -> argparse.ArgumentParser:
    """Add the subcommand and its arguments."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "plan",
        help="peak memory, FLOPs and the longest length of a model, without running it",
        description="Traces a training step of a real-size model without memory, and says what fits and what it costs.",
        epilog=f"configurations that are shipped: {', '.join(builtin_names())}",
    )
    parser.add_argument(
        "model", help="a Hugging Face configuration: a folder, a JSON file, org/name of the local cache, or a shipped one"
    )
    parser.add_argument("--seq", type=int, default=4096, metavar="TOKENS", help="length of a sequence (default: %(default)s)")
    parser.add_argument(
        "--batch", type=int, default=1, metavar="N", help="sequences of a step, on each device (default: %(default)s)"
    )
    parser.add_argument("--memory", metavar="SIZE", help="what a step may take, as 80G; then the plan is the fastest that fits")
    parser.add_argument("--host-memory", metavar="SIZE", help="what may wait on each host of up to 8 devices, as 1TiB")
    parser.add_argument("--dtype", choices=TYPES, default="bfloat16", help="type of parameters (default: %(default)s)")
    parser.add_argument("--lora-rank", type=int, metavar="R", help="train adapters of this rank in place of all parameters")
    parser.add_argument("--quantize", choices=SCHEMES, help="freeze the model, its layers' weights in fewer bits")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="none", help="whose state is counted (default: %(default)s)")
    parser.add_argument(
        "--optimizer-in-backward",
        action="store_true",
        help="it updates parameters in the backward pass, and frees gradients there",
    )
    parser.add_argument(
        "--world", type=int, default=1, metavar="N", help="devices that run the step together (default: %(default)s)"
    )
    parser.add_argument("--shard", choices=SHARDS, default=SHARDS[0], help="what these divide (default: %(default)s, nothing)")
    parser.add_argument(
        "--tensor", type=int, default=1, metavar="T", help="devices that cut layers among them (default: %(default)s)"
    )
    parser.add_argument(
        "--context", type=int, default=1, metavar="C", help="devices that divide each sequence (Ulysses; default: %(default)s)"
    )
    parser.add_argument("--objective", choices=OBJECTIVES, default="sft", help="what a step computes (default: %(default)s)")
    parser.add_argument(
        "--group", type=int, default=GROUP, metavar="N", help="answers to a prompt, for grpo (default: %(default)s)"
    )
    parser.add_argument("--max-length", action="store_true", help="find the longest length that fits into --memory")
    parser.add_argument("--max-batch", action="store_true", help="find the largest batch of --seq that fits into --memory")
    parser.add_argument("--chunk-size", type=int, metavar="ROWS", help="the option chunk_size, in place of the plan's choice")
    parser.add_argument("--loss-chunk-size", type=int, metavar="ROWS", help="the option loss_chunk_size, in its place, too")
    parser.add_argument("--save", choices=SAVE_LEVELS, help="the option save, in place of the plan's choice")
    parser.add_argument("--keep-every", type=int, metavar="K", help="the option keep_every, in place of the plan's choice")
    parser.add_argument(
        "--offload",
        choices=OFFLOADS,
        nargs="?",
        const=OFFLOADS[0],
        help="let inputs of stages wait on the host for the backward half (alone: %(const)s), or results of attention, too",
    )
    parser.add_argument(
        "--device", default="H100", help=f"to plan for, with its kernels and rates: {', '.join(DEVICES)}, or here"
    )
    parser.add_argument("--no-baselines", action="store_true", help="leave out eager, with gradient checkpointing and without")
    add_html_argument(parser)
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")
    return parser


def run(arguments: argparse.Namespace) -> str:
    """Return the text to print."""
    config_file(arguments.model)  # refuse a wrong name before torch is imported
    from streamfx.frontend.gc_pause import collected, uncollected
    from streamfx.tools.planner.search import MOST_TRACES

    searched = arguments.max_length or arguments.max_batch
    with written_as_html(arguments) as reports, traces(MOST_TRACES if searched else 1) as noted:
        with collected() if searched else uncollected():
            report = _plan_for(arguments, noted)
        reports.append(report)
    return json.dumps(report.summary(), indent=2) if arguments.json else str(report)


@contextmanager
def traces(trace_count: int) -> Iterator[Callable[[Prediction], None]]:
    """Show progress on a terminal: the index of the current trace, out of at most `most`, and the result of the last one."""
    done = 1
    with show_activity(f"planning {done} of {trace_count}" if trace_count > 1 else "planning") as now:

        def noted(prediction: Prediction) -> None:
            """Show the last prediction and the index of the next trace."""
            nonlocal done
            done = min(done + 1, trace_count)
            last_result = f"{prediction.batch:,} x {prediction.length:,} tokens take {format_bytes(prediction.peak_bytes)}"
            now(f"planning {done} of {trace_count} ({last_result})" if trace_count > 1 else f"planning ({last_result})")

        yield noted


def _plan_for(arguments: argparse.Namespace, noted: Callable[[Prediction], None]) -> PlanReport:
    """Call `streamfx.plan` with the parsed arguments."""
    from streamfx.tools.planner.plan import plan

    option_values = {
        name: getattr(arguments, name) for name in ("chunk_size", "loss_chunk_size", "save", "keep_every", "offload")
    }
    return plan(
        arguments.model,
        seq=arguments.seq,
        batch=arguments.batch,
        memory=arguments.memory,
        host_memory=arguments.host_memory,
        dtype=arguments.dtype,
        lora_rank=arguments.lora_rank,
        quantize=arguments.quantize,
        optimizer=arguments.optimizer,
        optimizer_in_backward=arguments.optimizer_in_backward,
        world=arguments.world,
        shard=arguments.shard,
        tensor=arguments.tensor,
        context=arguments.context,
        max_length=arguments.max_length,
        max_batch=arguments.max_batch,
        objective=arguments.objective,
        group=arguments.group,
        device=arguments.device,
        baselines=not arguments.no_baselines,
        options={name: value for name, value in option_values.items() if value is not None},
        noted=noted,
    )
