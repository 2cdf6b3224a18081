"""Text tables of tests: a row per line, fields between bars, sections after `# --`; an indented line continues the one before.

`tests/tables/` has tables of Python expressions: those in `test_masks.txt` belong to `test_masks.py` and use its global names.
"""

from pathlib import Path
from typing import Any

TABLES = Path(__file__).parents[1] / "tables"


def read(path: Path, fields: int) -> dict[str, list[list[str]]]:
    """The rows of each section. The last field may contain bars."""
    sections: dict[str, list[list[str]]] = {"": []}
    for line in path.read_text().replace("\n  ", " ").splitlines():
        if line.startswith("# -- "):
            sections[line.removeprefix("# -- ")] = []
        elif line and not line.startswith("#"):
            row = [field.strip() for field in line.split(" | ", fields - 1)]
            assert len(row) == fields, f"{path.name}: {line}"
            list(sections.values())[-1].append(row)
    return sections


def named_cases(section: str, names: dict[str, Any], of: str = "") -> dict[str, Any]:
    """Values by name: rows `name | expression`, or functions of the parameters `of`. `names` are the globals of a module."""
    path, found = _path(names), dict[str, Any]()
    for name, code in (row.split(" | ", 1) for (row,) in read(path, 1)[section]):
        assert name not in found, f"{path.name} has {name} twice"
        found[name] = _value(f"lambda {of}: {code}" if of else code, f"{path.name}: {name}", names)
    return found


def listed_cases(section: str, names: dict[str, Any]) -> list[Any]:
    """Values of rows that have no name; most are tuples."""
    path = _path(names)
    return [_value(code, f"{path.name}: {code}", names) for (code,) in read(path, 1)[section]]


def _path(names: dict[str, Any]) -> Path:
    return TABLES / f"{names['__name__'].rpartition('.')[2]}.txt"


def _value(code: str, name: str, names: dict[str, Any]) -> Any:
    """The name, as the name of a file, distinguishes functions for Dynamo."""
    return eval(compile(f"({code})", name, "eval"), names)
