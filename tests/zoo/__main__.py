"""python -m tests.zoo: see the package's docstring."""

import argparse
import json

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
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    grouped_products_in_float64()
    if chosen.model_types:
        for row in run(chosen.model_types, ROWS if chosen.again else None, LIMIT):
            print(json.dumps(row, indent=1))
    if chosen.all:
        measure_all(chosen.again)
    if chosen.report:
        write(known(ROWS))


def measure_all(again: bool) -> None:
    done = set() if again else set(known(ROWS))
    todo = [model_type for model_type in model_types() if model_type not in done]
    for number, row in enumerate(run(todo, ROWS, LIMIT), 1):
        print(f"{number}/{len(todo)} {line_of(row)}", flush=True)
    tidy(ROWS)


def line_of(row: dict[str, object]) -> str:
    figures = [str(row[key]) for key in ("worst", "share", "attention", "error", "failed", "reasons") if row.get(key)]
    return f"{row['model_type']}: {row['status']} {' '.join(figures)}"


main()
