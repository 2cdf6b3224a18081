"""`streamfx doctor`: check whether streamfx works on this machine."""

from __future__ import annotations

import argparse
import json
import platform
import time
from importlib import metadata
from typing import Any

import streamfx
from streamfx.errors import describe_error
from streamfx.tools.cli.arguments import NOT_SO, CommandResult

PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "lightning", "triton")
GROUP = "torch_dynamo_backends"


def add(subparsers: Any) -> argparse.ArgumentParser:
    """Add the subcommand and its arguments."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "doctor",
        help="show versions, device, kernels and entry point, and run a short self-test",
        description="Checks the installation, and trains one step of a small decoder with and without the backend.",
    )
    parser.add_argument("--json", action="store_true", help="print all findings as JSON")
    return parser


def run(arguments: argparse.Namespace) -> CommandResult:
    """Return the text to print and the exit code."""
    found = findings()
    healthy = found["entry_point"] == "found" and found["self_test"]["ok"]
    text = json.dumps(found, indent=2) if arguments.json else _findings_text(found, healthy)
    return CommandResult(text, 0 if healthy else NOT_SO)


def findings() -> dict[str, Any]:
    """Return the installed versions, the usable device and kernels, and the result of the self-test."""
    import torch

    from streamfx.integrations.minimum_versions import installed_version
    from streamfx.kernels.sdpa import KERNELS
    from streamfx.torch_private.versions import untested

    return {
        "streamfx": streamfx.__version__,
        "python": platform.python_version(),
        "packages": {name: installed_version(name) for name in PACKAGES},
        "untested": untested(),
        "device": _device(),
        "fused_attention": sorted(KERNELS),
        "entry_point": _entry_point(),
        "optimize_ddp": bool(torch._dynamo.config.optimize_ddp),
        "self_test": self_test(),
    }


def _device() -> str:
    """Describe the GPU and its free memory, or the CPU."""
    import torch

    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return f"{torch.cuda.get_device_name()}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    return f"cpu, {torch.get_num_threads()} threads"


def _entry_point() -> str:
    """Return "found" if the backend is registered by name, otherwise what is wrong."""
    points = [point for point in metadata.entry_points(group=GROUP) if point.name == "streambp"]
    if not points:
        return "missing: install streamfx with pip (also editable), or pass backend=streamfx.streambp"
    try:
        loaded = points[0].load()
    except Exception as error:
        return f"broken ({points[0].value}, {describe_error(error)}): reinstall streamfx"
    return "found" if loaded is streamfx.streambp else f"another package's: {points[0].value}"


def self_test() -> dict[str, Any]:
    """Run one step of a small decoder and compare it with eager."""
    from streamfx.tools.cli.small import difference

    start = time.perf_counter()
    try:
        report = difference()
    except Exception as error:
        return {"ok": False, "error": f"{type(error).__name__}: {error}", "seconds": time.perf_counter() - start}
    return {"ok": report.ok, "max_error": report.max_error, "seconds": time.perf_counter() - start}


def _package_text(name: str, version: str | None) -> str:
    """Describe the version of a package, and whether it is too old."""
    from streamfx.integrations.minimum_versions import MIN_VERSIONS, is_too_old

    too_old = f" (streamfx.enable needs {MIN_VERSIONS[name]})" if is_too_old(name, version) else ""
    return f"{name} {version or 'not installed'}{too_old}"


def _findings_text(findings: dict[str, Any], healthy: bool) -> str:
    """Return the findings as a table, followed by a verdict."""
    installed = ", ".join(_package_text(name, version) for name, version in findings["packages"].items())
    test = findings["self_test"]
    outcome = f"largest relative difference from eager {test['max_error']:.1e}" if "max_error" in test else test["error"]
    lines = {
        "streamfx": f"{findings['streamfx']}, Python {findings['python']}",
        "packages": installed,
        **({"untested": findings["untested"]} if findings["untested"] else {}),
        "device": findings["device"],
        "fused attention": f"streams on {', '.join(findings['fused_attention'])}",
        "entry point": findings["entry_point"],
        "DDP": "set torch._dynamo.config.optimize_ddp = False before training with DDP" if findings["optimize_ddp"] else "ready",
        "self-test": f"{'passed' if test['ok'] else 'FAILED'} in {test['seconds']:.1f} s, {outcome}",
    }
    verdict = "streamfx works here" if healthy else "something is wrong: see the lines above"
    return "\n".join([*(f"{name:<16}{text}" for name, text in lines.items()), verdict])
