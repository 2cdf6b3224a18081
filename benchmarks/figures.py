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
from pathlib import Path
from typing import Any

from streamfx.cli import main as streamfx_command

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docs" / "figures.json"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(<!-- figures: ([\w -]+) -->\n)(.*?)(\n<!-- end -->)", re.DOTALL)
GIB = 1 << 30

Figures = dict[str, dict[str, Any]]

LONGEST = "--memory 80GiB --max-length --no-baselines"
ADAPTERS = f"--lora-rank 16 --keep-every 1 {LONGEST}"
COMMANDS = {
    "Qwen3-4B, all": f"Qwen3-4B --keep-every 1 {LONGEST}",
    "Qwen3-8B, 150,000": "Qwen3-8B --seq 150000 --keep-every 1 --no-baselines",
    "Qwen3-8B, all": f"Qwen3-8B --keep-every 1 {LONGEST}",
    "Qwen3-8B, keep_every=6": f"Qwen3-8B --keep-every 6 {LONGEST}",
    "Qwen3-8B, offload": "Qwen3-8B --seq 1000000 --keep-every 1 --offload --no-baselines",
    "Qwen3-8B, adapters": f"Qwen3-8B {ADAPTERS}",
    "Qwen3-14B, adapters": f"Qwen3-14B {ADAPTERS}",
    "Qwen3-32B, adapters": f"Qwen3-32B {ADAPTERS}",
    "Qwen3-8B, DPO": f"Qwen3-8B --objective dpo {ADAPTERS}",
    "Qwen3-8B, DPO, keep_every=6": f"Qwen3-8B --objective dpo --lora-rank 16 --keep-every 6 {LONGEST}",
    "Qwen3-8B, GRPO": f"Qwen3-8B --objective grpo {ADAPTERS}",
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.figures", description=__doc__)
    parser.add_argument("--only", nargs="*", default=[""], metavar="TEXT", help="figures whose names hold one of these texts")
    parser.add_argument("--pages", action="store_true", help="make no figures, write those that are there")
    options = parser.parse_args()
    described = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True, cwd=ROOT)
    commit = described.stdout.strip()  # before any figure is written
    figures: Figures = json.loads(FILE.read_text()) if FILE.exists() else {}
    for name, command in COMMANDS.items():
        if not options.pages and any(text in name for text in options.only):
            figures[name] = made(command, commit)
            print(f"{name}: {figures[name]}", flush=True)
            FILE.write_text(json.dumps({name: figures[name] for name in COMMANDS if name in figures}, indent=1) + "\n")
    for page in PAGES:
        page.write_text(written(page.read_text(), figures))


def made(command: str, commit: str) -> dict[str, Any]:
    """What a plan says, in the figures that are quoted."""
    with redirect_stdout(io.StringIO()) as printed:
        if streamfx_command(["plan", *command.split(), "--json"]) != 0:
            raise RuntimeError(f"streamfx plan {command} failed")
    found = json.loads(printed.getvalue())
    figures = {"tokens": found["length"], "longest": found["max_length"] is not None, "peak": found["peak_bytes"]}
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

PAPER = {  # what is quoted of the StreamBP paper
    "Qwen3-4B, all": "200K",
    "Qwen3-8B, 150,000": "72K",
    "Qwen3-8B, adapters": "142K",
    "Qwen3-14B, adapters": "85K",
    "Qwen3-32B, adapters": "16K",
    "Qwen3-8B, DPO": "60.9K",
    "Qwen3-8B, GRPO": "16.5K",
}
ROWS = {
    "Qwen3-4B, all": ("Qwen3-4B", "all"),
    "Qwen3-8B, 150,000": ("Qwen3-8B", "all"),
    "Qwen3-8B, all": ("Qwen3-8B", "all"),
    "Qwen3-8B, keep_every=6": ("Qwen3-8B, `keep_every=6`", "all"),
    "Qwen3-8B, offload": ('Qwen3-8B, `offload="inputs"`', "all"),
    "Qwen3-8B, adapters": ("Qwen3-8B", "adapters"),
    "Qwen3-14B, adapters": ("Qwen3-14B", "adapters"),
    "Qwen3-32B, adapters": ("Qwen3-32B", "adapters"),
    "Qwen3-8B, DPO": ("Qwen3-8B, DPO", "adapters"),
    "Qwen3-8B, DPO, keep_every=6": ("Qwen3-8B, DPO, `keep_every=6`", "adapters"),
    "Qwen3-8B, GRPO": ("Qwen3-8B, GRPO", "adapters"),
}


def what_fits(figures: Figures) -> str:
    lines = ["| model | trained | tokens | peak GiB | StreamBP |", "|---|---|---|---|---|"]
    for name, (model, trained) in ROWS.items():
        found, paper = figures[name], PAPER.get(name, "")
        longest = ", the longest" if found["longest"] else ""
        lines.append(
            f"| {model} | {trained} | {found['tokens']:,}{longest} | {found['peak'] / GIB:.1f} | {paper} |".replace("|  |", "| |")
        )
    return "\n".join(lines)


def in_short(figures: Figures) -> str:
    whole, sixth, pairs = (figures[name] for name in ("Qwen3-8B, all", "Qwen3-8B, keep_every=6", "Qwen3-8B, DPO"))
    return (
        f"Qwen3-8B trains in full on {whole['tokens']:,} tokens in {whole['peak'] / GIB:.1f} GiB, on {sixth['tokens']:,} with "
        f"`keep_every=6`, and adapters of it\nby DPO on pairs of {pairs['tokens']:,}."
    )


BLOCKS: dict[str, Callable[[Figures], str]] = {
    "what fits": what_fits,
    "in short": in_short,
}


if __name__ == "__main__":
    main()
