"""Measures each model type in a separate process with a time limit, and writes docs/coverage.md.

Rows are lines of JSON; the last row of a type counts.
"""

import json
import multiprocessing
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.zoo.measure import BOUND, Row, measured
from tests.zoo.models import BATCH, CHUNK
from tests.zoo.models import ROWS as LENGTH

ROWS = Path(__file__).parent / "rows.jsonl"
LIMIT = 240  # seconds


def known(path: Path = ROWS) -> dict[str, Row]:
    """The rows so far, by model type."""
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return {row["model_type"]: row for row in rows}


def run(model_types: Iterable[str], path: Path | None, limit: int = LIMIT) -> Iterable[Row]:
    """Measure one after another; append each row to the file at once."""
    code = revision()
    for model_type in model_types:
        row = in_own_process(model_type, limit) | {"revision": code}
        if path is not None:
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
        yield row


def revision() -> str:
    """The measured commit, with a mark if files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def tidy(path: Path = ROWS) -> None:
    """One row a type, in order."""
    rows = sorted(known(path).values(), key=lambda row: row["model_type"])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def in_own_process(model_type: str, limit: int) -> Row:
    """The row from a forked process; torch and transformers are loaded once, here."""
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


# -- the page

PAGE = Path(__file__).parents[2] / "docs" / "coverage.md"
MOST = 110  # characters of a reason in the table
HEAD = Path(__file__).with_name("coverage_head.md").read_text()  # a template


def write(rows: Mapping[str, Row], page: Path = PAGE) -> None:
    page.write_text(text_of(rows))


def text_of(rows: Mapping[str, Row]) -> str:
    ordered = [rows[name] for name in sorted(rows)]
    measured = [row for row in ordered if "worst" in row]
    rest = [row for row in ordered if "worst" not in row]
    parts = [HEAD.format(batch=BATCH, rows=LENGTH, chunk=CHUNK, bound=BOUND), *summary(ordered), *table(measured)]
    if rest:
        parts += ["\n## Not measured\n\n", "| model type | what happened |\n|---|---|\n"]
        parts += [f"| {row['model_type']} | {row['status']}: {cell(row['error'])} |\n" for row in rest]
    return "".join(parts)


def summary(rows: list[Row]) -> Iterable[str]:
    """Counts of statuses, and causes of fallbacks, the most frequent first."""
    statuses = Counter(row["status"] for row in rows)
    yield f"{len(rows)} model types: " + ", ".join(f"{count} {status}" for status, count in statuses.most_common()) + ". "
    streamed = sum(row["status"] == "exact" and not row["reasons"] for row in rows)
    yield f"{streamed} stream everything of substance.\n\n"
    revisions = Counter(row.get("revision", "unknown") for row in rows)
    yield "Measured at " + ", ".join(f"{code} ({count})" for code, count in revisions.most_common()) + ".\n\n"
    found = Counter(cause for row in rows for cause in {cause_of(reason) for reason in row.get("reasons", ())})
    if found:
        yield "| model types | fallback |\n|---|---|\n"
        yield from (f"| {found[cause]} | {cell(cause)} |\n" for cause in sorted(found, key=lambda cause: (-found[cause], cause)))
        yield "\n"


def table(rows: list[Row]) -> Iterable[str]:
    yield "## Model types\n\n| model type | error | graphs | streamed | attention | whole |\n|---|---|---|---|---|---|\n"
    for row in rows:
        share = "" if row["share"] is None else f"{100 * row['share']:.0f} %"
        error = f"{row['worst']:.0e}" if row["status"] == "exact" else f"**{row['worst']:.0e}**"
        error += "*" if row.get("apart") else ""
        causes = "; ".join(dict.fromkeys(cell(cause_of(reason)) for reason in row["reasons"]))
        yield f"| {row['model_type']} | {error} | {row['graphs']} | {share} | {', '.join(row['attention'])} | {causes} |\n"


def cause_of(reason: str) -> str:
    """A reason without the line of code."""
    return re.sub(r" \([^()]*\.py:\d+.*$", "", reason)[:MOST]


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
