"""The functions of the loops of each stage as lines that refer to lines of the model's code, and back; for HTML reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from streamfx.tools.report.as_python.step_module import WrittenLoop
from streamfx.tools.report.stage_titles import names_together

COMMENT, BACKWARD = "# ", "backward of "


@dataclass(frozen=True)
class CodeLine:
    """A line of code; if it is a comment with a line of the model, `user_line` is the index of that line in its stage."""

    text: str
    user_line: int | None = None


@dataclass(frozen=True)
class UserLine:
    """A line of the model's code, and the indices of the lines of the loops' code that come from it."""

    text: str
    code_lines: tuple[int, ...]


@dataclass(frozen=True)
class StageCode:
    """The loops of stages, which have equal loops if there are several: their number, code, and the model's lines in it."""

    name: str
    stages: tuple[str, ...]
    num_loops: int
    lines: tuple[CodeLine, ...]
    user_lines: tuple[UserLine, ...]


def stage_codes(functions: Sequence[WrittenLoop]) -> tuple[StageCode, ...]:
    """Return the code of each stage, in the order of the first loops; functions of the same stages are together."""
    groups: dict[tuple[str, ...], list[WrittenLoop]] = {}
    for function in functions:
        groups.setdefault(tuple(sorted(set(function.stages))), []).append(function)
    return tuple(_stage_code(group) for group in groups.values())


def _stage_code(functions: Sequence[WrittenLoop]) -> StageCode:
    """Return the code of these functions, and the lines of the model in it."""
    texts = "\n\n".join(function.text() for function in functions).splitlines()
    found: dict[str, list[int]] = {}  # by line of the model, the lines of code
    lines: list[CodeLine] = []
    for number, text in enumerate(texts):
        comment = text.strip()
        if not comment.startswith(COMMENT):
            lines.append(CodeLine(text))
            continue
        user_line = comment.removeprefix(COMMENT).removeprefix(BACKWARD)
        found.setdefault(user_line, []).append(number)
        lines.append(CodeLine(text, list(found).index(user_line)))
    user_lines = tuple(UserLine(text, tuple(numbers)) for text, numbers in found.items())
    stages = functions[0].stages_in_order
    name = names_together(stages) or "between stages"
    return StageCode(name, tuple(stages), len(functions), tuple(lines), user_lines)
