"""What no CPU can settle."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks.gpu import Check, Place, checks
from benchmarks.settings import Rows, Settings


def gpu(settings: Settings) -> Rows:
    """Checks of this GPU, one after another, each with its own time limit; a line of JSON for each finding as it comes.

    A figure stands beside what it is compared with: an error beside eager's own in the same type, seconds and bytes beside
    another way's, a peak beside the plan's. On a CPU, and with --quick, sizes are small: that shows that the checks run, and
    nothing else.
    """
    place = Place(settings.device, settings.quick or settings.device == "cpu")
    rows: Rows = []
    for check in checks().values():
        settings.tell(check.name)
        for row in found(check, place):
            print(json.dumps(row), flush=True)
            rows.append(row)
    return rows


def found(check: Check, place: Place) -> Iterator[dict[str, Any]]:
    """The findings of a check, and a last row that says why it ended where it did not end well."""
    command = [sys.executable, "-m", "benchmarks.gpu", check.name, place.device, "small" if place.small else "whole"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = process.communicate(timeout=check.seconds)
        why = "" if process.returncode == 0 else (err.strip().splitlines() or [f"code {process.returncode}"])[-1]
    except subprocess.TimeoutExpired:
        process.kill()
        out, _ = process.communicate()
        why = f"stopped after {check.seconds} s"
    yield from (json.loads(line) for line in out.splitlines() if line.startswith("{"))
    if why:
        yield {"check": check.name, "case": "", "what": "failed", "figure": why, "beside": None, "ratio": None}
