"""python -m tests.random_decoders --count 5000 --seed 0: count the exact random decoders, and print the smallest inexact ones.

Each of these is printed as a literal for found.txt; so is the decoder of a kind and a number by `--keep KIND NUMBER`.
"""

import argparse
import logging
import sys
import time
import warnings
from collections import defaultdict

import torch

from tests.random_decoders import change_over
from tests.random_decoders.checking import Failure, peaks_of, smallest, tried
from tests.random_decoders.kinds import KINDS, numbered
from tests.random_decoders.program import needed, program
from tests.support.peaks import TOLERANCE


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="the number of the first decoder")
    parser.add_argument("--shrink", type=int, default=150, help="how many programs to try for each sort of failure")
    parser.add_argument("--compiled", action="store_true", help="compile all of them with torch.compile, which takes longer")
    parser.add_argument("--kinds", nargs="*", default=(), choices=tuple(KINDS), help="only decoders of these kinds")
    parser.add_argument(
        "--change-over", action="store_true", help="only steps in which eager bodies change over to compiled ones"
    )
    parser.add_argument("--show", action="store_true", help="only print the programs")
    parser.add_argument("--memory", action="store_true", help="only compare peaks of steps with those without streamfx")
    parser.add_argument("--keep", nargs=2, metavar=("KIND", "NUMBER"), help="only print a decoder for found.txt")
    arguments = parser.parse_args()
    if arguments.keep:
        kind, number = arguments.keep
        print(needed(numbered(int(number), (kind,))))
        return 0
    numbers = range(arguments.seed, arguments.seed + arguments.count)
    if arguments.show:
        for number in numbers:
            print(program(numbered(number, tuple(arguments.kinds), arguments.compiled)))
        return 0
    torch.set_num_threads(1)
    logging.getLogger("streamfx").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    if arguments.memory:
        return compare_memory(numbers, tuple(arguments.kinds))
    if arguments.change_over:
        return count_changes(numbers, tuple(arguments.kinds))
    failures = survey(numbers, arguments.compiled, tuple(arguments.kinds))
    for sort, found in failures.items():
        print(f"\n=== {len(found)} x {sort}; numbers {[number for number, _ in found][:20]}")
        print(smallest(found[0][1], arguments.shrink), flush=True)
    return 1 if failures else 0


def survey(numbers: range, all_compiled: bool, kinds: tuple[str, ...] = ()) -> dict[str, list[tuple[int, Failure]]]:
    """Run decoders by their numbers; return failures by sort."""
    failures, began = defaultdict[str, list[tuple[int, Failure]]](list), time.monotonic()
    for done, number in enumerate(numbers, 1):
        outcome = tried(numbered(number, kinds, all_compiled))
        if isinstance(outcome, Failure):
            if outcome.sort not in failures:
                print(f"\n{number}: {outcome.sort}", flush=True)
            failures[outcome.sort].append((number, outcome))
        wrong, each = sum(map(len, failures.values())), (time.monotonic() - began) / done
        sys.stderr.write(f"\r{done} of {len(numbers)}, {wrong} wrong of {len(failures)} sorts, {each:.2f} s each")
    return failures


def count_changes(numbers: range, kinds: tuple[str, ...]) -> int:
    """Print each decoder with a step that is not exact, and how many changed over; return 1 if any step is not exact."""
    failures, changed, began = 0, 0, time.monotonic()
    for done, number in enumerate(numbers, 1):
        outcome = change_over.tried(numbered(number, kinds))
        if isinstance(outcome, Failure):
            failures += 1
            print(f"\n{number}: {outcome.sort}\n{outcome}", flush=True)
        else:
            changed += outcome > 0
        each = (time.monotonic() - began) / done
        sys.stderr.write(f"\r{done} of {len(numbers)}, {changed} changed over, {failures} wrong, {each:.2f} s each")
    print(f"\n{changed} of {len(numbers)} decoders changed over, {failures} are not exact")
    return int(failures > 0)


def compare_memory(numbers: range, kinds: tuple[str, ...]) -> int:
    """Print each decoder whose step takes more memory than with AOTAutograd's own partitions; return 1 if there is any."""
    more = 0
    for number in numbers:
        try:
            found = peaks_of(numbered(number, kinds))
        except Exception as error:  # no tracer traces some programs
            print(f"{number}: {type(error).__name__}: {error}"[:200], flush=True)
            continue
        if found.ratio > TOLERANCE:
            more += 1
            print(f"{number}: {found.ratio:.3f} of {found.others}", flush=True)
    print(f"{more} of {len(numbers)} take more memory")
    return int(more > 0)


if __name__ == "__main__":
    sys.exit(main())
