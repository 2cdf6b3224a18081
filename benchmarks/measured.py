"""Tables of docs/measured: lines of `python -m benchmarks.gpu`, under a line of conditions; and of a first step, by phase."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.tables import markdown

FOLDER = Path(__file__).parents[1] / "docs" / "measured"
WAYS = {
    "streambp": "streamfx, default options",
    "streambp, memory_budget=auto": 'streamfx, `memory_budget="auto"`',
    "checkpointing": "checkpointing, compiled",
    "checkpointing, loss in chunks": "checkpointing, compiled, loss in chunks",
}
HALVES = ("forward", "backward")
KERNELS = ("FA2, one call", "FA2, two calls", "cuDNN, two calls")


def cases(name: str) -> dict[tuple[str, str], dict[str, Any]]:
    """All figures of a file, by check and case."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for line in (FOLDER / f"{name}.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "figures" in record:
            found.setdefault((record["check"], record["case"]), {}).update(record["figures"])
    return found


def steps(plans: dict[str, dict[str, Any]]) -> str:
    """Steps of Qwen3-8B: seconds and peaks beside checkpointing's and the plan's."""
    found = {check: figures for (check, _), figures in cases("h100-steps").items()}
    heads = ("tokens", "way", "s", "of checkpointing's", "plan's s", "peak GiB", "plan's GiB", "launches", "idle", "first step s")
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for length in ("8K", "32K"):
        for way, title in WAYS.items():
            if (own := found.get(f"{way}, {length}")) is None:
                continue
            planned = plans[f"a step of {int(length[:-1]) * 1024:,}"]
            plan = {"streambp": planned, "checkpointing": planned["checkpointing"]}.get(way, {})
            seconds = plan.get("compiled_seconds", plan.get("seconds"))
            cells = [
                length,
                title,
                f"{own['step s']:.3f}",
                f"{own['step s'] / found[f'checkpointing, {length}']['step s']:.2f}",
                f"{seconds:.3f}" if seconds else "",
                f"{own['peak GiB']:.1f}",
                f"{plan['peak_bytes'] / (1 << 30):.1f}" if plan else "",
                f"{own['launches']:,}",
                f"{own['idle %']:.1f} %",
                f"{own['first step s']:.0f}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def attention(_: dict[str, dict[str, Any]]) -> str:
    """TFLOP/s of the attention of a chunk, forward and backward, by kernel."""
    lines = ["| keys | rows | " + " | ".join(KERNELS) + " |", "|---" * (2 + len(KERNELS)) + "|"]
    for (check, case), figures in cases("h100-kernels").items():
        if check.startswith("attention rates") and "128K" not in check:
            cells = [
                " / ".join(f"{figures[f'{kernel}: {half} TFLOP/s']:.0f}" for half in ("forward", "backward"))
                for kernel in KERNELS
            ]
            lines.append(f"| {check.split()[2]} | {case.split()[0]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def table(suite: str, _: dict[str, dict[str, Any]]) -> str:
    """The rows of a suite of `python -m benchmarks`."""
    return markdown(json.loads((FOLDER / f"{suite.replace('_', '-')}.json").read_text())[suite])
