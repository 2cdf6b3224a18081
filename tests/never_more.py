"""python -m tests.never_more zoo | random --count 500: does any program take more memory with streamfx than without?

Each line is the peak of a real step with default options, over that of `torch.compile` with AOTAutograd's own partitions.
"""

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from tests.random_decoders.checking import executed
from tests.random_decoders.kinds import KINDS, numbered
from tests.random_decoders.specification import Decoder
from tests.support.exactness import call, fresh, scalar_of
from tests.support.peaks import TOLERANCE, Peaks, peaks
from tests.support.precision import default_dtype, widen_models

widen_models()


def of_random_decoder(decoder: Decoder) -> Peaks:
    names = executed(decoder)
    inputs, reduce = names["inputs"], names["reduce"]
    return peaks(names["model"], lambda model: reduce(model(**fresh(inputs))))


def of_model_type(name: str) -> Peaks:
    from tests.zoo.models import built, dtype_of, inputs

    with default_dtype(dtype_of(name)):
        model = built(name)
        given = inputs(name, model)
        return peaks(model, lambda compiled: scalar_of(call(compiled, given)))


def all_of(chosen: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    if chosen.what == "zoo":
        from tests.zoo.models import grouped_products_in_float64, model_types

        grouped_products_in_float64()
        names = chosen.names or model_types()
        yield from ((name, lambda name=name: of_model_type(name)) for name in names)
    else:
        numbers = range(chosen.seed, chosen.seed + chosen.count)
        kinds = tuple(chosen.kinds)
        yield from ((str(number), lambda number=number: of_random_decoder(numbered(number, kinds))) for number in numbers)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.never_more", description=__doc__)
    parser.add_argument("what", choices=("zoo", "random"))
    parser.add_argument("names", nargs="*", help="model types; all without")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="the number of the first random decoder")
    parser.add_argument("--kinds", nargs="*", default=(), choices=tuple(KINDS), help="only random decoders of these kinds")
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    ratios: list[float] = []
    failed = 0
    for name, measure in all_of(parser.parse_args()):
        try:
            found = measure()
        except Exception as error:  # eager itself may not run a type, and no tracer a program
            failed += 1
            print(json.dumps({"name": name, "error": f"{type(error).__name__}: {error}"[:200]}), flush=True)
            continue
        ratios.append(found.ratio)
        mark = {"more": True} if found.ratio > TOLERANCE else {}
        line = {"name": name, "ratio": round(found.ratio, 3), "ours": found.ours, "others": found.others, **mark}
        print(json.dumps(line), flush=True)
    more = sum(ratio > TOLERANCE for ratio in ratios)
    print(f"{len(ratios)} programs, {more} above {TOLERANCE}, the largest {max(ratios, default=0):.3f}; {failed} did not run")
    return 1 if more else 0


if __name__ == "__main__":
    sys.exit(main())
