"""python -m tests.versions --python 3.12 3.13 --torch 2.14.1: do the tests pass with these versions?

Each pair of a Python and a PyTorch gets a new environment with the newest other packages, and runs the default tests; arguments
after `--tests` go to pytest. `--record` keeps the rows in docs/measured/versions.jsonl, and writes docs/versions.md from them.
"""

import argparse
import datetime
import json
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FILE, PAGE = ROOT / "docs" / "measured" / "versions.jsonl", ROOT / "docs" / "versions.md"
PACKAGES = ("torch", "transformers")
COLUMNS = ("python", *PACKAGES, "passed", "failed", "skipped", "files", "date", "commit")
VERSIONS_OF = f"""
import json, platform
from importlib.metadata import version
print(json.dumps({{"python": platform.python_version(), **{{name: version(name) for name in {PACKAGES}}}}}))
"""
HEAD = """\
# Versions

`pip` installs streamfx with PyTorch {oldest} to {newest}, on Python 3.10 or later. With another version of PyTorch the first
compilation and `streamfx doctor` say that it is not tested. Each row below is a run of the default tests on the CPU:
`python -m tests.versions --python 3.13 --torch 2.14.1 --record` makes an environment with these versions and the newest other
packages, runs the tests, and writes this page. *files* says how many of the test files ran. Tests are skipped if they need a GPU
or a package that is not available for these versions, and if they are for long runs (`--long`). Failed tests are named as in
the commit of their row; later commits may move them.

"""

Row = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=__doc__)
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="versions, as 3.13, or paths of interpreters")
    parser.add_argument("--torch", nargs="+", default=["2.14.1"], help="versions of PyTorch")
    parser.add_argument("--transformers", help="a version of transformers; the newest without")
    parser.add_argument("--folder", type=Path, help="keep environments here, and use those that are here already")
    parser.add_argument("--record", action="store_true", help="keep the rows, and write docs/versions.md")
    parser.add_argument("--tests", nargs=argparse.REMAINDER, default=[], help="all that follows is for pytest")
    chosen = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for python, torch in product(map(interpreter, chosen.python), chosen.torch):
            asked = [f"torch=={torch}", f"transformers{f'=={chosen.transformers}' if chosen.transformers else '>=5'}"]
            own = environment(python, asked, (chosen.folder or Path(folder)).resolve())
            rows.append(tested(own, chosen.tests))
            if chosen.folder is None:
                shutil.rmtree(own)  # several GB
            if chosen.record:
                record(rows)
    print("\n".join(table(rows)))
    return int(any(row["failed"] for row in rows))


def interpreter(name: str) -> str:
    """The interpreter of a version, or at a path."""
    found = name if Path(name).is_file() else shutil.which(f"python{name}")
    if found is None or subprocess.run([found, "-c", ""], capture_output=True).returncode:
        raise SystemExit(f"there is no python{name} on the PATH that runs: pass the path of an interpreter")
    return found


def said(command: Sequence[str | Path]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()


def environment(python: str, asked: Sequence[str], folder: Path) -> Path:
    """A virtual environment with streamfx, all that its tests need, and the versions that are asked for."""
    version = said([python, "-c", "import sys; print(sys.version.split()[0])"])
    own = folder / "-".join(["python", version, *asked])
    if not own.exists():
        subprocess.run([python, "-m", "venv", own], check=True)
        subprocess.run([own / "bin" / "python", "-m", "pip", "install", *asked, "-e", f"{ROOT}[test]"], check=True)
    return own


def tested(own: Path, arguments: Sequence[str]) -> Row:
    """Run the tests in an environment: its versions, and counts of the report that pytest wrote."""
    python = own / "bin" / "python"
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        subprocess.run([python, "-m", "pytest", f"--junitxml={report}", *arguments], cwd=ROOT)
        if not report.exists():
            raise SystemExit("pytest wrote no report: see above")
        counts = counted(report.read_text())
    date, commit = datetime.date.today().isoformat(), said(["git", "describe", "--always", "--dirty"])
    return {**json.loads(said([python, "-c", VERSIONS_OF])), **counts, "date": date, "commit": commit}


def counted(report: str) -> Row:
    """How many tests passed, failed and were skipped, which ones failed, and how many files ran.

    >>> case = '<testcase classname="tests.test_a" name="test_b">{}</testcase>'
    >>> counted("<testsuites>" + case.format("") + case.format("<failure/>") + "</testsuites>")["failed"]
    ['tests.test_a::test_b']
    """
    cases = [*xml.fromstring(report).iter("testcase")]
    skipped = [case for case in cases if case.find("skipped") is not None]
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    ran = {case.get("classname", "").split(".")[1] for case in cases if case.get("classname", "").startswith("tests.test_")}
    return {
        "passed": len(cases) - len(skipped) - len(failed),
        "failed": sorted({f"{case.get('classname')}::{case.get('name')}" for case in failed}),
        "skipped": len(skipped),
        "files": f"{len(ran)} of {len(list(Path(__file__).parent.glob('test_*.py')))}",
    }


def record(rows: Iterable[Row]) -> None:
    """Keep rows, each in place of an earlier one with the same versions, and write the page."""
    kept = {_key(row): row for row in [*known(), *rows]}
    FILE.write_text("".join(json.dumps(kept[key]) + "\n" for key in sorted(kept)))
    PAGE.write_text(page(known()))


def known() -> list[Row]:
    return [json.loads(line) for line in FILE.read_text().splitlines()] if FILE.exists() else []


def _key(row: Row) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, re.findall(r"\d+", row[name].split("+")[0]))) for name in ("python", *PACKAGES))


def page(rows: Sequence[Row]) -> str:
    """The text of docs/versions.md."""
    from streamfx.torch_private.versions import NEWEST, OLDEST

    oldest, newest = (".".join(map(str, version)) for version in (OLDEST, NEWEST))
    lines = [HEAD.format(oldest=oldest, newest=newest), *(f"{line}\n" for line in table(rows))]
    for row in (row for row in rows if row["failed"]):
        lines.append(f"\nWith Python {row['python']} and PyTorch {row['torch']} these failed:\n\n")
        explained = row.get("explained", {})  # written by hand: the reason of each failure
        counts = Counter((name.partition("::")[0], explained.get(name)) for name in row["failed"])
        for (file, reason), count in counts.items():
            names = [f"`{name}`" for name in row["failed"] if (name.partition("::")[0], explained.get(name)) == (file, reason)]
            text = f"{count} tests of `{file}`" if count > 6 else ", ".join(names)
            lines.append(f"- {text}: {reason}\n" if reason else f"- {text}\n")
    return "".join(lines)


def table(rows: Iterable[Row]) -> list[str]:
    shown = ({**row, "failed": len(row["failed"])} for row in rows)
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    return [*lines, *("| " + " | ".join(str(row[name]) for name in COLUMNS) + " |" for row in shown)]


if __name__ == "__main__":
    sys.exit(main())
