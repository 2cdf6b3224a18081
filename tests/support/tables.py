"""Text tables of tests: a row per line, fields between bars, sections after `# --`; an indented line continues the one before."""

from pathlib import Path


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
