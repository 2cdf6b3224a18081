"""The predicted figures that README and docs quote: `python -m benchmarks.figures` makes them anew, and writes the pages.

Figures are kept in docs/figures.json, each with the command that printed it and the commit that it was printed by. Pages
quote them in blocks, `<!-- figures: NAME -->` to `<!-- end -->`, written from that file and by nobody's hand; a test compares.
Plans of real sizes take minutes each: `--only TEXT` makes those whose names hold a text, `--pages` only writes the pages.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import subprocess
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import streamfx
from benchmarks import measured
from streamfx.tools.cli import main as streamfx_command
from streamfx.tools.report.verdict import CHUNKED

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docs" / "figures.json"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(<!-- figures: ([\w -]+) -->\n)(.*?)(\n<!-- end -->)", re.DOTALL)
GIB = 1 << 30
KEPT = ("length", "batch", "max_length", "peak_bytes", "seconds", "launches", "bytes_of_products", "bytes_of_totals")

OTHERS = ("peak_bytes", "launches", "seconds", "compiled_seconds")
WIRE = ("bytes", "far_bytes", "bytes_per_second", "seconds", "waited_seconds", "early_reductions")
HOST = ("bytes_of_all", "copied_bytes", "bytes_per_second", "seconds", "waited_seconds")

STEP = ("by_term", "memory", "step_seconds", "step_waited_seconds")

Figures = dict[str, dict[str, Any]]

LONGEST = "--memory 80GiB --max-length --no-baselines"
ADAPTERS = "--quantize nf4 --lora-rank 32"
QUANTIZED = f"{ADAPTERS} --max-length --no-baselines"
CONTEXT = f"--optimizer adamw --shard zero3 --offload {LONGEST}"
ON_HOST = "--host-memory 1TB --optimizer adamw_master --optimizer-in-backward --offload parameters,inputs --no-baselines"
COMMANDS = {
    "Qwen3-8B, all": f"Qwen3-8B {LONGEST}",
    "Llama-3.1-8B, nf4": f"Llama-3.1-8B {QUANTIZED} --memory 80GiB",
    "Llama-3.1-8B, nf4, 24 GiB": f"Llama-3.1-8B {QUANTIZED} --memory 24GiB",
    "Llama-3.1-70B, nf4, offload": f"Llama-3.1-70B {QUANTIZED} --memory 80GiB --offload",
    "GPT-OSS-20B, nf4": f"GPT-OSS-20B {QUANTIZED} --memory 80GiB",
    "Qwen3-8B, every boundary": f"Qwen3-8B --keep-every 1 {LONGEST}",
    "Qwen3-8B, adapters": f"Qwen3-8B --lora-rank 16 --keep-every 1 {LONGEST}",
    "Qwen3-8B, DPO": f"Qwen3-8B --objective dpo --lora-rank 16 --keep-every 1 {LONGEST}",
    "Qwen3-8B, zero3 on 8": "Qwen3-8B --seq 131072 --optimizer adamw --world 8 --shard zero3 --no-baselines",
    "Qwen3-8B, a sequence on 8": f"Qwen3-8B --world 8 --context 8 {CONTEXT}",
    "Qwen3-8B, a sequence on 32": f"Qwen3-8B --world 32 --context 32 {CONTEXT}",
    "Llama-3.1-8B, a sequence on 8": f"Llama-3.1-8B --world 8 --context 8 {CONTEXT}",
    "Llama-3.1-8B, a sequence on 32": f"Llama-3.1-8B --world 32 --context 32 {CONTEXT}",
    "Qwen3-32B, weights on the host": f"Qwen3-32B --seq 131072 --memory 80GiB {ON_HOST}",
    "Gemma-3-12B": "Gemma-3-12B --seq 65536 --memory 80GiB --optimizer adamw --world 8 --shard zero3",
    "Qwen3-8B, GRPO": f"Qwen3-8B --objective grpo --seq 131072 --memory 80GiB {ADAPTERS} --offload --no-baselines",
    "a step of 8,192": "Qwen3-8B --seq 8192",
    "a step of 32,768": "Qwen3-8B --seq 32768",
    "a step of 131,072": "Qwen3-8B --seq 131072",
    "a frontier": "Qwen3-8B --seq 32768 --frontier",
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.figures", description=__doc__)
    parser.add_argument("--only", nargs="*", default=[""], metavar="TEXT", help="figures whose names hold one of these texts")
    parser.add_argument("--pages", action="store_true", help="make no figures, write those that are there")
    parser.add_argument("--picture", action="store_true", help="draw the README's timeline anew, too")
    options = parser.parse_args()
    described = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True, cwd=ROOT)
    commit = described.stdout.strip()  # before any figure is written
    figures: Figures = json.loads(FILE.read_text()) if FILE.exists() else {}
    for name, command in COMMANDS.items():
        if not options.pages and any(text in name for text in options.only):
            figures[name] = made(command, commit)
            print(f"{name}: {figures[name]}", flush=True)
            FILE.write_text(json.dumps({name: figures[name] for name in COMMANDS if name in figures}, indent=1) + "\n")
    if options.picture:
        streamfx.plan("Qwen3-8B", seq=131_072).to_svg(ROOT / "docs" / "timeline.svg")
    for page in PAGES:
        page.write_text(written(page.read_text(), figures))


def made(command: str, commit: str) -> dict[str, Any]:
    """What a plan says, in the figures that are quoted."""
    with redirect_stdout(io.StringIO()) as printed:
        if streamfx_command(["plan", *command.split(), "--json"]) != 0:
            raise RuntimeError(f"streamfx plan {command} failed")
    found = json.loads(printed.getvalue())
    figures = {name: found[name] for name in KEPT}
    if found["frontier"]:
        figures["frontier"] = found["frontier"]
    figures["rows"] = [stage["chunk_size"] for stage in found["stages"]]
    figures["peak_by_term"] = found["peak_by_term"]
    if found["wire"] is not None:
        figures["wire"] = {name: found["wire"][name] for name in WIRE}
    if found["host"] is not None:
        figures["host"] = {name: found["host"][name] for name in HOST}
        if "by_term" in found["host"]:
            figures["host"] |= {name: found["host"][name] for name in STEP}
    if (checkpointing := found["ways"].get("gradient checkpointing")) is not None:
        figures["checkpointing"] = {name: checkpointing[name] for name in OTHERS}
    if (in_chunks := found["ways"].get(CHUNKED)) is not None:
        figures["loss in chunks"] = {name: in_chunks[name] for name in OTHERS}
    return {**figures, "command": f"streamfx plan {command}", "commit": commit}


def written(text: str, figures: Figures) -> str:
    """A page with its blocks as the figures are; a block of which some are not made yet stays as it is."""

    def block(found: re.Match[str]) -> str:
        try:
            return found[1] + BLOCKS[found[2]](figures) + found[4]
        except KeyError:
            return found[0]

    return BLOCK.sub(block, text)


# -- blocks

ROWS = {  # model, what is trained, and what others report for it
    "Qwen3-8B, all": ("Qwen3-8B", "all", ""),
    "Llama-3.1-8B, nf4": ("Llama-3.1-8B, nf4", "adapters, rank 32", "Unsloth 342,733"),
    "Llama-3.1-8B, nf4, 24 GiB": ("Llama-3.1-8B, nf4, in 24 GiB", "adapters, rank 32", "Unsloth 78,475"),
    "Llama-3.1-70B, nf4, offload": ('Llama-3.1-70B, nf4, `offload="inputs"`', "adapters, rank 32", "Unsloth 89,389"),
    "GPT-OSS-20B, nf4": ("GPT-OSS-20B, nf4", "adapters, rank 32", "Unsloth 290,000; 500,000 with tiled MLP"),
    "Qwen3-8B, every boundary": ("Qwen3-8B, `keep_every=1`", "all", "StreamBP 72K"),
    "Qwen3-8B, adapters": ("Qwen3-8B, `keep_every=1`", "adapters, rank 16", "StreamBP 142K"),
    "Qwen3-8B, DPO": ("Qwen3-8B, DPO, `keep_every=1`", "adapters, rank 16", "StreamBP 60.9K"),
}


def what_fits(figures: Figures) -> str:
    lines = [
        "| model | trained | tokens | peak GiB | tokens per chunk | minutes per step | reported by others |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, (model, trained, other) in ROWS.items():
        found = figures[name]
        rows = min(found["rows"]) * found["batch"]
        cells = [
            model,
            trained,
            f"{found['length']:,}",
            f"{found['peak_bytes'] / GIB:.1f}",
            f"{rows:,}",
            f"{found['seconds'] / 60:.0f}",
        ]
        lines.append(" | ".join(["|", *cells, other, "|"]).replace("| |", "|").strip())
    return "\n".join(lines)


def chunks(figures: Figures) -> str:
    heads = (
        "tokens",
        "rows, layers",
        "rows, head",
        "totals, of products' bytes",
        "operators",
        "of its",
        "seconds",
        "of its",
        "peak, of its",
    )
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for name in ("a step of 8,192", "a step of 32,768", "a step of 131,072"):
        found = figures[name]
        other = found["checkpointing"]
        pairs = (("launches", "launches"), ("seconds", "compiled_seconds"), ("peak_bytes", "peak_bytes"))
        shares = (found[own] / other[its] for own, its in pairs)
        launches, seconds, peak = (f"{share:.2f}" for share in shares)
        totals = f"{100 * found['bytes_of_totals'] / found['bytes_of_products']:.1f} %"
        cells = [
            f"{found['length']:,}",
            f"{found['rows'][1]:,}",
            f"{found['rows'][-1]:,}",
            totals,
            f"{found['launches']:,}",
            launches,
        ]
        lines.append("| " + " | ".join([*cells, f"{found['seconds']:.1f}", seconds, peak]) + " |")
    return "\n".join(lines)


def divided(figures: Figures) -> str:
    """A plan for several devices: what each holds at the peak, and sends."""
    found = figures["Qwen3-8B, zero3 on 8"]
    wire = found["wire"]
    lines = ["| on each device | |", "|---|---|", f"| tokens | {found['length']:,} |"]
    lines += [f"| peak | {found['peak_bytes'] / GIB:.1f} GiB |"]
    lines += [f"| {name} | {size / GIB:.2f} GiB |" for name, size in found["peak_by_term"].items() if size >= GIB // 100]
    lines += [f"| sent in a step | {wire['bytes'] / GIB:.1f} GiB |"]
    lines += [f"| communication time (exposed) | {wire['seconds']:.2f} s ({wire['waited_seconds']:.3f} s) |"]
    lines += [f"| time of a step | {found['seconds']:.1f} s |"]
    lines += [f"| reductions begun before the last loop | {100 * wire['early_reductions']:.0f} % |"]
    return "\n".join(lines)


def planned(name: str, figures: Figures) -> str:
    """A plan: its command, what a device holds at the peak, and what is sent, copied, and computed."""
    found = figures[name]
    lines = [f"`{found['command']}`", "", "| on each device | |", "|---|---|", f"| peak | {_gib(found['peak_bytes'])} |"]
    lines += [f"| {term} | {_gib(size)} |" for term, size in found["peak_by_term"].items() if size >= GIB // 10]
    for way, title in (("checkpointing", "peak of gradient checkpointing"), ("loss in chunks", "the same, the loss in chunks")):
        lines += [f"| {title} | {_gib(found[way]['peak_bytes'])} |"] if way in found else []
    if "host" in found:
        lines += [f"| offloaded, on the host of all devices | {_gib(found['host']['bytes_of_all'])} |"]
        lines += [f"| copy time (exposed) | {_times(found['host'])} |"]
    if "wire" in found:
        lines += [f"| communication time (exposed) | {_times(found['wire'])} |"]
    return "\n".join([*lines, f"| time of a step | {found['seconds']:.0f} s |"])


ALST = {  # Bekman et al., 2025 (arXiv 2506.13996): Llama-3.1-8B in full on 8 and on 32 devices of 80 GiB
    "Llama-3.1-8B, a sequence on 8": "3.7M",
    "Llama-3.1-8B, a sequence on 32": "15M",
}


def in_context(figures: Figures) -> str:
    """Plans for a sequence that many devices divide: what each holds at the peak, what waits on hosts, what takes time."""
    names = [name for name in COMMANDS if "a sequence on" in name]
    found = [figures[name] for name in names]
    terms = sorted(
        {term for one in found for term in one["peak_by_term"]}, key=lambda term: -found[0]["peak_by_term"].get(term, 0)
    )
    rows = {
        "tokens per sequence": [f"{one['length']:,}" for one in found],
        "tokens, reported for ALST": [ALST.get(name, "") for name in names],
        "peak": [_gib(one["peak_bytes"]) for one in found],
        **{term: [_gib(one["peak_by_term"].get(term, 0)) for one in found] for term in terms},
        "offloaded, per host of 8 devices": [_gib(one["host"]["bytes_of_all"]) for one in found],
        "sent in a step": [_gib(one["wire"]["bytes"]) for one in found],
        "sent between machines": [_gib(one["wire"]["far_bytes"]) for one in found],
        "communication time (exposed)": [_times(one["wire"]) for one in found],
        "copy time (exposed)": [_times(one["host"]) for one in found],
        "time of a step": [f"{one['seconds'] / 3600:.1f} h" for one in found],
    }
    lines = [
        "| on each device | " + " | ".join(name.replace(", a sequence", "") + " devices" for name in names) + " |",
        "|---" * (len(names) + 1) + "|",
    ]
    return "\n".join([*lines, *(f"| {' | '.join([name, *cells])} |" for name, cells in rows.items())])


def weights_on_the_host(figures: Figures) -> str:
    """A plan with weights, gradients and the optimizer's state on the host: what the device and the host hold, and times."""
    found = figures["Qwen3-32B, weights on the host"]
    host = found["host"]
    lines = [f"`{found['command']}`", "", "| on the device | | on the host | |", "|---|---|---|---|"]
    cells = [
        [("peak", found["peak_bytes"]), *((name, size) for name, size in found["peak_by_term"].items() if size >= GIB // 4)],
        [(f"of {_gib(host['memory'])}", host["bytes_of_all"]), *host["by_term"].items()],
    ]
    for pair in zip_longest(*cells):
        lines += ["| " + " | ".join("| " if cell is None else f"{cell[0]} | {_gib(cell[1])}" for cell in pair) + " |"]
    step = {"seconds": host["step_seconds"], "waited_seconds": host["step_waited_seconds"]}
    times = {
        "time of a step": f"{found['seconds']:.0f} s",
        "copied to the device and to the host": _gib(host["copied_bytes"]),
        "copy time (exposed)": _times(host),
        "time of the optimizer's step on the host (exposed)": _times(step),
    }
    return "\n".join([*lines, "", "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in times.items())])


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size < 100 * GIB else f"{size / GIB:,.0f} GiB"


def _times(found: dict[str, Any]) -> str:
    return f"{found['seconds']:.1f} s ({found['waited_seconds']:.1f} s)"


def in_short(figures: Figures) -> str:
    names = ("Qwen3-8B, all", "Qwen3-8B, every boundary", "Llama-3.1-8B, nf4", "Llama-3.1-8B, nf4, 24 GiB", "GPT-OSS-20B, nf4")
    whole, saving, quantized, small, experts = (f"{figures[name]['length']:,}" for name in names)
    return (
        f"In 80 GiB, all parameters of Qwen3-8B can be trained on sequences of up to {whole} tokens\n"
        f"({saving} with `keep_every=1`, as StreamBP saves the input of each layer).\n"
        f"Adapters of rank 32 can be trained on up to {quantized} tokens for Llama-3.1-8B in nf4 ({small} in 24 GiB),\n"
        f"and on up to {experts} for GPT-OSS-20B in nf4."
    )


PICTURED = "a step of 131,072"


def in_a_picture(figures: Figures) -> str:
    found = figures[PICTURED]
    other = found["checkpointing"]
    ours, theirs, in_chunks = (of["peak_bytes"] / GIB for of in (found, other, found["loss in chunks"]))
    time = found["seconds"] / other["compiled_seconds"]
    return (
        f"`streamfx plan` predicts a peak of **{ours:.0f} GiB** for training all parameters of Qwen3-8B on a sequence of\n"
        f"{found['length']:,} tokens (bfloat16, no optimizer, no offload), including parameters and gradients. It predicts\n"
        f"{theirs:.0f} GiB with gradient checkpointing ({theirs / ours:.1f} times as much), or {in_chunks:.0f} GiB\n"
        "if the checkpointed run also computes its loss in chunks. With both runs compiled, it predicts that\n"
        f"a streamfx step takes {time:.2f} times as long as a step with gradient checkpointing."
    )


def on_the_frontier(figures: Figures) -> str:
    found = figures["a frontier"]
    other = found["checkpointing"]
    lines = [
        "| peak | of checkpointing | time of a step | of checkpointing | values saved for backward |",
        "|" + "---|" * 5,
    ]
    for plan in found["frontier"]:
        peak, share = plan["peak_bytes"] / GIB, plan["peak_bytes"] / other["peak_bytes"]
        time, of_time = plan["seconds"], plan["seconds"] / other["compiled_seconds"]
        lines.append(f"| {peak:.1f} GiB | {share:.2f} | {time:.1f} s | {of_time:.2f} | {plan['choice']} |")
    return "\n".join(lines)


BESIDE = {  # what is trained, where, and what others report to have run
    "Qwen3-8B, every boundary": (
        "Qwen3-8B, all parameters, `keep_every=1`, no optimizer, no offload, one 80 GB GPU",
        "StreamBP 72K",
    ),
    "Llama-3.1-8B, nf4": ("Llama-3.1-8B, QLoRA of rank 32, no optimizer, no offload, one 80 GB GPU", "Unsloth 343K"),
    "Llama-3.1-8B, nf4, 24 GiB": ("Llama-3.1-8B, QLoRA of rank 32, no optimizer, no offload, one 24 GB GPU", "Unsloth 78K"),
    "GPT-OSS-20B, nf4": (
        "GPT-OSS-20B, QLoRA of rank 32, no optimizer, no offload, one 80 GB GPU",
        "Unsloth 290K; 500K with tiled MLP",
    ),
    "Qwen3-8B, a sequence on 8": ("Qwen3-8B, all parameters, AdamW, offload, 8 GPUs of 80 GB", "TRL's guide 1.0M"),
    "Llama-3.1-8B, a sequence on 8": ("Llama-3.1-8B, all parameters, AdamW, offload, 8 GPUs of 80 GB", "ALST 3.7M"),
    "Llama-3.1-8B, a sequence on 32": ("Llama-3.1-8B, all parameters, AdamW, offload, 32 GPUs of 80 GB", "ALST 15M"),
}


def beside_others(figures: Figures) -> str:
    lines = ["| training | longest sequence in tokens, predicted | longest sequence, reported by others |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {what} | {figures[name]['length']:,} | {other} |" for name, (what, other) in BESIDE.items())])


BLOCKS: dict[str, Callable[[Figures], str]] = {
    "what fits": what_fits,
    "in short": in_short,
    "in a picture": in_a_picture,
    "beside others": beside_others,
    "chunks": chunks,
    "divided": divided,
    "in context": in_context,
    "weights on the host": weights_on_the_host,
    "on the frontier": on_the_frontier,
    "steps on an H100": measured.steps,
    "attention on an H100": measured.attention,
    "a first step": partial(measured.table, "first_step"),
    "showcases": partial(measured.table, "showcases"),
    "Gemma at 65K": partial(planned, "Gemma-3-12B"),
    "GRPO at 128K": partial(planned, "Qwen3-8B, GRPO"),
    "a run of a trainer": partial(measured.table, "trainer_run"),
}


if __name__ == "__main__":
    main()
