"""python -m tests.zoo: see the package's docstring."""

import argparse
import json
from pathlib import Path

import torch

from tests.support.precision import widen_models

widen_models()

from tests.zoo.models import grouped_products_in_float64, model_types  # noqa: E402
from tests.zoo.runs import LIMIT, ROWS, known, run, tidy, write  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description="Measure tiny models of transformers' types.")
    parser.add_argument("model_types", nargs="*", help="measure these and print their rows")
    parser.add_argument("--all", action="store_true", help="measure every type that has no row yet")
    parser.add_argument("--again", action="store_true", help="measure types that have a row, too")
    parser.add_argument("--report", action="store_true", help="write docs/coverage.md from the rows")
    parser.add_argument("--rows", type=Path, default=ROWS, help="the file of rows")
    parser.add_argument("--limit", type=int, default=LIMIT, help="seconds that a model may take")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    grouped_products_in_float64()
    if chosen.model_types:
        for row in run(chosen.model_types, chosen.rows if chosen.again else None, chosen.limit):
            print(json.dumps(row, indent=1))
    if chosen.all:
        measure_all(chosen.rows, chosen.again, chosen.limit)
    if chosen.report:
        write(known(chosen.rows))


def measure_all(path: Path, again: bool, limit: int) -> None:
    done = set() if again else set(known(path))
    todo = [model_type for model_type in model_types() if model_type not in done]
    for number, row in enumerate(run(todo, path, limit), 1):
        print(f"{number}/{len(todo)} {line_of(row)}", flush=True)
    tidy(path)


def line_of(row: dict[str, object]) -> str:
    figures = [str(row[key]) for key in ("worst", "share", "attention", "error", "failed", "reasons") if row.get(key)]
    return f"{row['model_type']}: {row['status']} {' '.join(figures)}"


main()
