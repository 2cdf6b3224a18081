"""Train a decoder on long sequences three ways, and compare: eager, gradient checkpointing, and streambp.

    python examples/train_long_context.py                        # a small Qwen3, built in
    python examples/train_long_context.py --model smollm2        # the real SmolLM2-135M
    python examples/train_long_context.py --model path/to/model  # a Hugging Face folder

Each way runs in a process of its own, from the same weights, on the same text: that of Python's standard library. The table
shows that the losses are the same, how far the gradients are from eager's (with a tick where that is rounding), and what a step
takes, also as a part of what gradient checkpointing takes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peak_memory import PeakMemory

from streamfx.tools.inspect.verify import TOLERANCES

INTERRUPTED = 130  # what shells say of a program that Ctrl-C ended
METHODS = {"eager": "eager", "checkpointing": "gradient checkpointing", "streambp": "streambp"}
DOING = "streamfx: "  # begins a line that says what is being compiled


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Train a decoder on long sequences: eager, checkpointing, streambp.")
    parser.add_argument("--model", default="small", help="'small' (built in), 'smollm2', or a Hugging Face folder")
    parser.add_argument("--length", type=int, help="tokens per sequence (default: 8192, on a GPU 32768)")
    parser.add_argument("--steps", type=int, help="optimizer steps (default: 3, on a GPU 10)")
    parser.add_argument("--chunk-size", type=int, help="rows per chunk of streambp (default: chosen for you)")
    parser.add_argument("--quick", action="store_true", help="the short form: 1024 tokens, 2 steps")
    parser.add_argument("--json", action="store_true", help="print the table as JSON; progress goes to stderr")
    parser.add_argument("--work", nargs=2, metavar=("METHOD", "FOLDER"), help=argparse.SUPPRESS)
    return parser


def with_defaults(options: argparse.Namespace) -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    if options.length is None:
        options.length = 1024 if options.quick else 32768 if on_gpu else 8192
    if options.steps is None:
        options.steps = 2 if options.quick else 10 if on_gpu else 3
    for name in ("length", "steps", "chunk_size"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise SystemExit(f"--{name.replace('_', '-')} must be 1 or more, not {value}")
    return options


# -- one way, in a process of its own


def work(method: str, folder: Path, options: argparse.Namespace) -> None:
    """Train one way; tell the parent after each step, as a line of JSON."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        for event in training(method, folder, options):
            print(json.dumps(event), flush=True)
    except torch.OutOfMemoryError:
        print(json.dumps({"failed": "out of memory"}), flush=True)
    except IndexError:
        asked = f"--model {options.model} --length {options.length}"
        raise SystemExit(f"{asked}: the model has not so many positions, or too small a vocabulary") from None


def training(method: str, folder: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    from workload import load_model

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = load_model(options.model).to(device).train()
    batches = torch.load(folder / "tokens.pt").to(device)
    loss_of = prepared(method, model, options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    memory = PeakMemory(device)
    yield {"device": str(device), "parameters": sum(p.numel() for p in model.parameters())}
    for step, ids in enumerate(batches):
        memory.start()
        begin = time.perf_counter()
        loss = loss_of(ids[None])
        loss.backward()
        value = loss.item()
        del loss
        seconds, peak = time.perf_counter() - begin, memory.bytes()
        difference = gradient_difference(model, method, folder) if step == 0 else None
        optimizer.step()
        optimizer.zero_grad()
        event = {"step": step, "loss": value, "seconds": seconds, "peak": peak, "difference": difference}
        yield {**event, "tolerance": TOLERANCES.get(model.dtype, 0.0)}


def prepared(method: str, model: Any, options: argparse.Namespace) -> Any:
    """A function from token ids to the loss: all that differs between the three ways."""
    if method == "checkpointing":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def loss_of(ids: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, labels=ids).loss

    if method == "streambp":
        chosen = {} if options.chunk_size is None else {"chunk_size": options.chunk_size}
        return torch.compile(loss_of, backend="streambp", options={"progress": True, **chosen})
    return loss_of


def gradient_difference(model: torch.nn.Module, method: str, folder: Path) -> float | None:
    """The largest relative difference of a parameter's gradient from eager's, which leaves its own for others and has none."""
    path = folder / "gradients.pt"
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if method == "eager":
        torch.save(gradients, path)
        return None
    if not path.exists():  # eager ran out of memory
        return None
    expected = torch.load(path, mmap=True)
    return max(float((gradients[k] - expected[k]).norm() / expected[k].norm().clamp_min(1e-30)) for k in expected)


# -- all ways, and the table


def run(method: str, folder: Path, options: argparse.Namespace, progress: Any) -> dict[str, Any]:
    """Start one way and follow it to its end; returns its row of the table."""
    bar = progress.add_task(METHODS[method], total=options.steps, loss="starting")
    process = subprocess.Popen(
        [sys.executable, __file__, *sys.argv[1:], "--work", method, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    listener = threading.Thread(target=heard, args=(process, folder / "errors.txt", bar, progress), daemon=True)
    listener.start()
    try:
        events = list(followed(process, bar, progress))
        code = process.wait()
        listener.join()
    except KeyboardInterrupt:
        process.kill()
        process.wait()
        progress.update(bar, loss="interrupted")
        raise
    if code == -signal.SIGKILL or (events and "failed" in events[-1]):
        progress.update(bar, loss="out of memory")
        return {"method": METHODS[method], "failed": "out of memory"}
    if code:
        raise SystemExit(f"{METHODS[method]} stopped: {last_line(folder / 'errors.txt')}")
    return row(method, [event for event in events if "loss" in event])


def followed(process: Any, bar: Any, progress: Any) -> Iterator[dict[str, Any]]:
    """What the process tells, step by step."""
    for line in process.stdout:
        event = json.loads(line)
        if "loss" in event:
            progress.update(bar, advance=1, loss=f"loss {event['loss']:.4f}")
        elif "parameters" in event:
            progress.update(bar, loss=f"first step, {event['parameters'] / 1e6:.0f} M parameters")
        yield event


def heard(process: Any, errors: Path, bar: Any, progress: Any) -> None:
    """Show what the process compiles, and keep what else it says."""
    with errors.open("w") as file:
        for line in process.stderr:
            if line.startswith(DOING) and line.endswith("...\n"):
                progress.update(bar, loss=line.removeprefix(DOING).strip())
            else:
                file.write(line)


def last_line(path: Path) -> str:
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    return lines[-1] if lines else "no message"


def row(method: str, steps: list[dict[str, Any]]) -> dict[str, Any]:
    settled = steps[1:] or steps  # the first step also compiles
    difference = steps[0]["difference"]
    return {
        "method": METHODS[method],
        "loss": steps[-1]["loss"],
        "gradient_difference": difference,
        "rounding_only": None if difference is None else difference <= steps[0]["tolerance"],
        "peak_bytes": max(step["peak"] for step in settled),
        "seconds_per_step": statistics.median(step["seconds"] for step in settled),
        "first_step_seconds": steps[0]["seconds"],
    }


def print_table(rows: list[dict[str, Any]], title: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("", no_wrap=True)
    for heading in ("last loss", "gradients", "peak memory", "a step", "the first"):
        table.add_column(heading, justify="right")
    usual = next((item for item in rows if item["method"] == METHODS["checkpointing"] and "failed" not in item), None)
    for item in rows:
        table.add_row(item["method"], *([item["failed"], *"----"] if "failed" in item else cells(item, usual)))
    Console(width=100).print(table)
    if any(item.get("rounding_only") for item in rows):
        print("\u2713 matches eager up to rounding (relative difference); in parentheses: ratio to gradient checkpointing")


def cells(item: dict[str, Any], usual: dict[str, Any] | None) -> list[str]:
    difference = item["gradient_difference"]
    tick = {True: "\u2713 ", False: "\u2717 ", None: ""}[item["rounding_only"]]
    return [
        f"{item['loss']:.6f}",
        "-" if difference is None else f"{tick}{difference:.1e}",
        f"{item['peak_bytes'] / 2**20:,.0f} MiB{share(item, usual, 'peak_bytes')}",
        f"{item['seconds_per_step']:.1f} s{share(item, usual, 'seconds_per_step')}",
        f"{item['first_step_seconds']:.1f} s",
    ]


def share(item: dict[str, Any], usual: dict[str, Any] | None, of: str) -> str:
    return "" if usual is None else f" ({item[of] / usual[of]:.2f})"


def run_all(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Adds a row for each way as it ends."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from workload import token_batches

    columns = (TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory() as folder,
        Progress(*columns, TextColumn("{task.fields[loss]}"), console=Console(stderr=True)) as progress,
    ):
        reading = progress.add_task("reading text", total=None, loss="")
        torch.save(token_batches(options.model, options.length, options.steps), Path(folder) / "tokens.pt")
        progress.update(reading, total=1, completed=1, loss=f"{options.steps} x {options.length:,} tokens")
        for method in METHODS:
            rows.append(run(method, Path(folder), options, progress))


def show(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps({"model": options.model, "length": options.length, "steps": options.steps, "rows": rows}), flush=True)
    elif rows:
        print_table(rows, f"{options.model}: {options.steps} steps on {options.length:,} tokens each")


def main() -> None:
    options = with_defaults(arguments().parse_args())
    if options.work:
        return work(options.work[0], Path(options.work[1]), options)
    rows: list[dict[str, Any]] = []
    try:
        run_all(rows, options)
    except KeyboardInterrupt:
        show(rows, options)
        print(f"interrupted: {len(rows)} of {len(METHODS)} ways were finished", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    show(rows, options)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
