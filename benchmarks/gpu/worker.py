"""The process that runs checks: reads the name of one per line, writes findings as lines of JSON as soon as they exist."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import torch

import streamfx.frontend.backend  # noqa: F401  (names the backend for torch.compile: there may be no entry point)
from benchmarks.gpu.checks import COMMANDS
from benchmarks.gpu.measures import Finding
from benchmarks.gpu.place import GIB, LEFT, Place

MOST_WARNINGS, WIDTH = 4, 300  # of a check, and characters of each


def main() -> None:
    command, device, small = sys.argv[1:]
    faulthandler.enable()
    answers = own_output()
    place = place_for(device, small == "small")
    write(answers, {"device": place.device, "small": place.small})
    gc.freeze()  # a collection before each step need not traverse imported modules
    checks = {check.name: check for check in COMMANDS[command].checks}
    for line in sys.stdin:
        check = checks[json.loads(line)["check"]]
        module, function = check.function.split(":")
        with warnings_of_streamfx() as heard:
            error = ""
            try:
                run = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)
                for finding in run(place, *check.arguments):
                    write(answers, finding.row(check.name))
            except Exception as raised:
                traceback.print_exc()
                error = described(raised)
        for text in heard[:MOST_WARNINGS]:
            write(answers, Finding("warning", {"streamfx": text[:WIDTH]}, detail=True).row(check.name))
        write(answers, {"end": error, "retire": why_retire(place)})


def place_for(device: str, small: bool) -> Place:
    """The device that was asked for; "auto" is the GPU if there is one."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)
    return Place(device, small or device == "cpu")


def why_retire(place: Place) -> str:
    """Why this process is to run no further check; empty if it may."""
    try:
        left = place.clean()
    except Exception as error:
        return f"the device is unusable: {described(error)}"
    return f"{left / GIB:.2f} GiB are left of the check" if left > LEFT else ""


def described(error: Exception) -> str:
    """The error, and the innermost line of this repository that it came from."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "site-packages" not in frame.filename]
    where = f" ({os.path.relpath(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:WIDTH]}{where}"


@contextmanager
def warnings_of_streamfx() -> Iterator[list[str]]:
    """What the backend warns of: a body without a compiler, a kernel that is not used."""
    heard: list[str] = []

    class Hearing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage() not in heard:
                heard.append(record.getMessage())

    handler, log = Hearing(logging.WARNING), logging.getLogger("streamfx")
    log.addHandler(handler)
    try:
        yield heard
    finally:
        log.removeHandler(handler)


def own_output() -> IO[str]:
    """Standard output, for answers alone: what libraries print goes to standard error."""
    own = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return own


def write(answers: IO[str], answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
