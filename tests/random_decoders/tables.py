"""Tables of expressions and of lines of programs from text files: `positions` is what attention.txt has after `[positions]`.

    # a comment
    $rows | x[:, : t // 2]
    [terms]
    rows squared | term = $rows.square().mean()
    rows in turn
        z = $rows.cumsum(1)
        term = z.mean()
    [means]
        term = ($1 - $2).mean()
    rows less x | $rows | x

An entry has a name, and one line after ` | ` or several indented ones. Lines of an entry `$rows` replace `$rows` in later lines.
Lines between the name of a table and its first entry are a template: entries after it have values for `$1` and `$2`.
"""

import re
from pathlib import Path
from typing import TypeAlias

Lines: TypeAlias = "tuple[str, ...]"
Table: TypeAlias = "dict[str, Lines]"


def tables(file: str) -> dict[str, Table]:
    """The tables of a text file of this folder, by name; a table may continue with another template."""
    found: dict[str, dict[str, list[str]]] = {}
    shared: dict[str, list[str]] = {}
    table: dict[str, list[str]] = {}
    template: list[str] = []
    lines: list[str] = []
    for line in (Path(__file__).parent / file).read_text().splitlines():
        name, *rest = line.split(" | ", 1)
        if not line or line.startswith("#"):
            continue
        if line.startswith("["):
            table, template = found.setdefault(line[1:-1], {}), []
            lines = template
        elif line.startswith(" "):
            lines += _filled(line[4:], shared)
        elif name.startswith("$"):
            lines = shared[name[1:]] = [text for item in rest for text in _filled(item, shared)]
        else:
            assert name not in table, f"{file} has {name} twice"
            lines = table[name] = _of_template(template, rest, shared)
    return {name: {entry: tuple(text) for entry, text in own.items()} for name, own in found.items()}


def _of_template(template: list[str], rest: list[str], shared: dict[str, list[str]]) -> list[str]:
    count = max((int(number) for number in re.findall(r"\$(\d)", "".join(template))), default=0)
    if not count:
        return [*template, *(text for item in rest for text in _filled(item, shared))]
    parts = rest[0].split(" | ", count - 1)
    own = {str(number): _filled(part, shared) for number, part in enumerate(parts, 1)}
    return [text for line in template for text in _filled(line, own)]


def _filled(line: str, shared: dict[str, list[str]]) -> list[str]:
    """The line, with each `$name` replaced; several lines may replace a line that is only a name."""
    body = line.lstrip()
    if body[1:] in shared and body.startswith("$"):
        return [line[: len(line) - len(body)] + text for text in shared[body[1:]]]
    return [re.sub(r"\$(\w+)", lambda found: "\n".join(shared.get(found[1], [found[0]])), line)]


def expressions(table: Table) -> dict[str, str]:
    """A table whose entries have one line each."""
    return {name: line for name, (line,) in table.items()}


def crossed(first: Table, second: Table, joint: str = ", ") -> Table:
    """Each entry of the one table followed by each of the other."""
    return {f"{name}{joint}{other}": lines + more for name, lines in first.items() for other, more in second.items()}


_PARTS = re.split(r"^---- (\w+)\n", (Path(__file__).parent / "program.txt").read_text(), flags=re.M)
TEMPLATES = dict(zip(_PARTS[1::2], (text[:-1] for text in _PARTS[2::2]), strict=True))  # by the names in program.txt
