"""python -m tests.mutations [kind ...]: see the package's docstring."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.mutations import KINDS, ROWS
from tests.mutations.row import Mutation
from tests.mutations.runs import CAUGHT, Copy, copied


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description="Put known faults back; tests have to fail.")
    parser.add_argument("kinds", nargs="*", metavar="kind", help=f"of these kinds alone: {', '.join(KINDS)}")
    parser.add_argument("--of", metavar="WORD", default="", help="only rows that have this in their file or their words")
    parser.add_argument("--log", type=Path, help="write the lines, and the end of what pytest said, to a file, too")
    parser.add_argument("--no-check", action="store_true", help="do not run the tests on the code as it is first")
    chosen = parser.parse_args()
    if unknown := set(chosen.kinds) - set(KINDS):
        parser.error(f"no such kind: {', '.join(sorted(unknown))}")
    rows = [row for row in ROWS if row.kind in (chosen.kinds or KINDS) and chosen.of in f"{row.file} {row.what}"]
    with copied() as copy:
        if not chosen.no_check and not passes_as_it_is(copy, rows):
            return 1
        return run(copy, rows, chosen.log)


def passes_as_it_is(copy: Copy, rows: list[Mutation]) -> bool:
    """Whether all tests of the rows pass before anything is changed: else a failure says nothing."""
    node_ids = sorted({test for row in rows for test in row.node_ids})
    status, output = copy.pytest(node_ids, limit=3600)
    if status:
        print(f"the tests do not pass on the code as it is\n{output[-3000:]}")
    return status == 0


def run(copy: Copy, rows: list[Mutation], log: Path | None) -> int:
    """Try the rows; 1 if one of them is not caught."""
    caught = 0
    for number, row in enumerate(rows, 1):
        outcome = copy.outcome(row)
        caught += outcome.found == CAUGHT
        print(f"{number}/{len(rows)} {outcome}", flush=True)
        if log is not None:
            with log.open("a") as file:
                file.write(f"{outcome}\n" + ("" if outcome.found == CAUGHT else f"{outcome.output}\n"))
    print(f"{caught} of {len(rows)} caught")
    return 0 if caught == len(rows) else 1


if __name__ == "__main__":  # processes that it begins import it, too
    sys.exit(main())
