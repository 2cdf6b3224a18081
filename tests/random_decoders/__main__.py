"""python -m tests.random_decoders --count 5000 --seed 0: how many random decoders are exact, and the smallest that are not."""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from collections import Counter, defaultdict
from random import Random
from typing import Any

import torch

from tests.random_decoders.checking import Failure, WrongProgram, run, smallest, sort_of
from tests.random_decoders.specification import Decoder, draw, ingredients


class Statistics:
    """Why parts of decoders ran whole, and with which ingredients."""

    def __init__(self) -> None:
        self.reasons: Counter[str] = Counter()
        self.whole: Counter[Any] = Counter()
        self.drawn: Counter[Any] = Counter()
        self.examples: dict[str, int] = {}

    def add(self, decoder: Decoder, facts: Any, number: int) -> None:
        reasons = {reason for one in facts for reason in one.reasons()}
        reasons |= {"no sequence was found" for one in facts if one.program is None}
        self.reasons.update(reasons)
        for reason in reasons:
            self.examples.setdefault(reason, number)
        own = set(ingredients(decoder))
        self.drawn.update(own)
        if reasons:
            self.whole.update(own)

    def __str__(self) -> str:
        lines = [f"{count:6} x {reason} (e.g. {self.examples[reason]})" for reason, count in self.reasons.most_common()]
        shares = sorted(((self.whole[item] / count, item) for item, count in self.drawn.items()), key=lambda pair: -pair[0])
        lines += [f"{share:6.0%} of those with {name}={value} ran whole in part" for share, (name, value) in shares[:15]]
        return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shrink", type=int, default=150, help="how many programs to try for each sort of failure")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("streamfx").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    statistics, failures, began = Statistics(), defaultdict[str, list[tuple[int, Failure]]](list), time.monotonic()
    for number in range(arguments.seed, arguments.seed + arguments.count):
        decoder = draw(Random(number))
        try:
            statistics.add(decoder, run(decoder).facts, number)
        except WrongProgram:
            raise
        except Exception as error:
            failures[sort_of(error)].append((number, Failure(decoder, sort_of(error), f"{type(error).__name__}: {error}"[:2000])))
        done, wrong = number + 1 - arguments.seed, sum(map(len, failures.values()))
        each = (time.monotonic() - began) / done
        sys.stderr.write(f"\r{done} of {arguments.count}, {wrong} wrong of {len(failures)} sorts, {each:.2f} s each")
    print(f"\n{statistics}")
    for sort, found in failures.items():
        print(f"\n=== {len(found)} x {sort}; numbers {[number for number, _ in found][:20]}")
        print(smallest(found[0][1], arguments.shrink))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
