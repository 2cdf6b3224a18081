"""python -m tests.corpus make | check | show NAME: the corpus of captured graphs, and what the passes make of each."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch

from tests.corpus.entries import FOLDER, Entry, Found
from tests.corpus.programs import captured, name_of, sources
from tests.support.precision import widen_models


def make(names: list[str], folder: Path) -> int:
    """Capture graphs anew."""
    failed = 0
    for source in sources():
        if names and not any(name in name_of(source) for name in names):
            continue
        begin = time.time()
        try:
            made = list(captured(source))
        except Exception as error:
            failed += 1
            print("not captured", source, "".join(traceback.format_exception_only(error)).strip()[:300], flush=True)
            continue
        for entry in made:
            entry.save(folder)
        print(source, [(entry.name, len(entry.graph["nodes"])) for entry in made], f"{time.time() - begin:.1f} s", flush=True)
    return failed


def found_in(names: list[str], folder: Path) -> dict[str, Any]:
    """What the passes make of each graph, which is exact."""
    found = {}
    for name in Entry.all(folder):
        if names and not any(part in name for part in names):
            continue
        begin = time.time()
        entry = Entry.load(name, folder)
        facts = entry.analysed()
        middle = time.time()
        entry.check(facts)
        found[name] = Found.of(facts).plain
        print(f"{name}: passes {middle - begin:.2f} s, runs {time.time() - middle:.2f} s", file=sys.stderr, flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.corpus", description=__doc__)
    parser.add_argument("what", choices=("make", "check", "show"))
    parser.add_argument("names", nargs="*")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    arguments = parser.parse_args()
    widen_models()
    torch.set_num_threads(1)
    logging.getLogger("streamfx").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    if arguments.what == "make":
        return make(arguments.names, arguments.folder)
    if arguments.what == "show":
        print(Found.of(Entry.load(arguments.names[0], arguments.folder).analysed()).listing)
        return 0
    print(json.dumps(found_in(arguments.names, arguments.folder), indent=1, sort_keys=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
