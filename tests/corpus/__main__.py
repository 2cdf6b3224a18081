"""python -m tests.corpus make | check | write: the corpus of captured graphs, and results of the passes.

make [PART ...]     capture the graphs whose names contain one of the parts
check [PART ...]    run the passes on each graph, compare the results, and print what differs from found.json
write [PART ...]    the same, and write found.json
"""

import argparse
import logging
import sys
import time
import traceback
import warnings
from pathlib import Path

import torch

from tests.corpus.entries import FOLDER, KEPT, Entry, Found, keep, kept_in
from tests.corpus.programs import captured, name_of, sources
from tests.support.precision import widen_models


def make(names: list[str], folder: Path) -> int:
    """Capture graphs."""
    failed = 0
    for source in sources():
        if names and not any(name in name_of(source) for name in names):
            continue
        begin = time.time()
        try:
            entries = list(captured(source))
        except Exception as error:
            failed += 1
            print("not captured", source, "".join(traceback.format_exception_only(error)).strip()[:300], flush=True)
            continue
        for entry in entries:
            entry.save(folder)
        print(source, [(entry.name, len(entry.graph["nodes"])) for entry in entries], f"{time.time() - begin:.1f} s", flush=True)
    return failed


def check(names: list[str], folder: Path, writes: bool) -> int:
    """Run the passes on each graph; print differences from the kept file, or write the file."""
    kept, differ, failed = kept_in(folder), 0, 0
    chosen = [name for name in Entry.all(folder) if not names or any(part in name for part in names)]
    for name in chosen:
        try:
            facts = (entry := Entry.load(name, folder)).analysed()
            entry.check(facts)
            found = Found.of(facts).plain
        except Exception:
            failed += 1
            print(name, traceback.format_exc(), flush=True)
            continue
        for field in sorted(found.keys() | kept.get(name, {}).keys()):
            before, after = kept.get(name, {}).get(field), found.get(field)
            if before != after:
                differ += 1
                print(f"{name}: {field} was {before}, is {after}", flush=True)
        kept[name] = found
    if writes:
        keep({name: kept[name] for name in Entry.all(folder) if name in kept}, folder)
    print(f"{len(chosen) - failed} graphs are exact, {failed} failed; {differ} facts differ from {KEPT}")
    return failed or (not writes and differ)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.corpus", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("command", choices=("make", "check", "write"))
    parser.add_argument("names", nargs="*")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    arguments = parser.parse_args()
    widen_models()
    torch.set_num_threads(1)
    logging.getLogger("streamfx").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    if arguments.command == "make":
        return make(arguments.names, arguments.folder)
    return check(arguments.names, arguments.folder, writes=arguments.command == "write")


if __name__ == "__main__":
    sys.exit(main())
