"""Each model type in a process of its own with a time limit; rows are lines of JSON, the last of a type counts."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.zoo.measure import Row, measured

ROWS = Path(__file__).parent / "rows.jsonl"
LIMIT = 240  # seconds


def known(path: Path = ROWS) -> dict[str, Row]:
    """The rows so far, by model type."""
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return {row["model_type"]: row for row in rows}


def run(model_types: Iterable[str], path: Path | None, limit: int = LIMIT) -> Iterable[Row]:
    """Measure one after the other; rows are added to the file at once."""
    code = revision()
    for model_type in model_types:
        row = in_own_process(model_type, limit) | {"revision": code}
        if path is not None:
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
        yield row


def revision() -> str:
    """The commit that is measured, with a mark where files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def tidy(path: Path = ROWS) -> None:
    """One row a type, in order."""
    rows = sorted(known(path).values(), key=lambda row: row["model_type"])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def in_own_process(model_type: str, limit: int) -> Row:
    """The row that a forked process sends back; torch and transformers are loaded once, here."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(model_type, sender), daemon=True)
    process.start()
    sender.close()
    try:
        if receiver.poll(limit):
            row: Row = receiver.recv()
            return row
        return {"model_type": model_type, "status": "timed out", "error": f"more than {limit} s"}
    except EOFError:
        process.join()
        return {"model_type": model_type, "status": "died", "error": f"exit code {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def _send(model_type: str, sender: Any) -> None:
    sender.send(measured(model_type))
