"""One check in a process of its own: `python -m benchmarks.gpu NAME DEVICE SMALL` prints a line of JSON per finding."""

from __future__ import annotations

import json
import sys

from benchmarks.gpu import Place, checks


def main() -> None:
    name, device, small = sys.argv[1:]
    check = checks()[name]
    for finding in check.run(Place(device, small == "small")):
        print(json.dumps(finding.row(name)), flush=True)


if __name__ == "__main__":
    main()
