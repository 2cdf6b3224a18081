"""python -m tests.mutations [kind ...]: see the package's docstring."""

import argparse
import sys
from pathlib import Path

from tests.mutations import KINDS, ROWS
from tests.mutations.row import Mutation
from tests.mutations.runs import CAUGHT, Copy, Outcome, copied


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description="Put known faults back; tests have to fail.")
    parser.add_argument("kinds", nargs="*", metavar="kind", help=f"of these kinds alone: {', '.join(KINDS)}")
    parser.add_argument("--of", metavar="WORDS", default="", help="only rows that have this in their file or their words")
    parser.add_argument("--log", type=Path, help="write the lines, and the end of what pytest said, to a file, too")
    chosen = parser.parse_args()
    if unknown := set(chosen.kinds) - set(KINDS):
        parser.error(f"no such kind: {', '.join(sorted(unknown))}")
    rows = [row for row in ROWS if row.kind in (chosen.kinds or KINDS) and chosen.of in f"{row.file} {row.what}"]
    with copied() as copy:
        caught = [outcome.test for outcome in tried(copy, rows, chosen.log) if outcome.found == CAUGHT]
        passes = passes_as_it_is(copy, caught)
    print(f"{len(caught)} of {len(rows)} caught")
    return 0 if passes and len(caught) == len(rows) else 1


def tried(copy: Copy, rows: list[Mutation], log: Path | None) -> list[Outcome]:
    """Run each row, and print each outcome."""
    found = []
    for number, row in enumerate(rows, 1):
        outcome = copy.outcome(row)
        found.append(outcome)
        print(f"{number}/{len(rows)} {outcome}", flush=True)
        if log is not None:
            with log.open("a") as file:
                file.write(f"{outcome}\n" + ("" if outcome.found == CAUGHT else f"{outcome.output}\n"))
    return found


def passes_as_it_is(copy: Copy, tests: list[str]) -> bool:
    """Whether the tests that failed pass on the code as it is: else their failure says nothing."""
    status, output = copy.pytest(sorted({f"tests/{test}" for test in tests}), limit=3600) if tests else (0, "")
    print("these tests pass on the code as it is" if not status else f"a test fails on the code as it is\n{output[-3000:]}")
    return status == 0


if __name__ == "__main__":  # processes that it begins import it, too
    sys.exit(main())
