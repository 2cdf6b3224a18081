"""Names of values in written code: hints become identifiers that are unique in their scope; long lines are wrapped."""

from __future__ import annotations

import keyword
import re
import textwrap
from collections.abc import Iterable, Iterator

WIDTH = 120  # columns
_OPENING, _CLOSING, _FIXED_SPACE = "([{", ")]}", "\x00"


class Identifiers:
    """Identifiers in use in one scope, such as a function."""

    def __init__(self, reserved: Iterable[str] = ()) -> None:
        self._used = set(reserved)

    @property
    def used(self) -> frozenset[str]:
        """The identifiers in use."""
        return frozenset(self._used)

    def new(self, hint: str) -> str:
        """Return an identifier that is not in use, similar to `hint`: `x`, `x_1`, ...; from then on it is in use."""
        base = identifier(hint)
        name, count = base, 0
        while name in self._used:
            count += 1
            name = f"{base}_{count}"
        self._used.add(name)
        return name


def identifier(hint: str) -> str:
    """
    >>> identifier("model.layers.0.weight"), identifier("0"), identifier("lambda")
    ('model_layers_0_weight', 'value_0', 'lambda_')
    """
    name = re.sub(r"\W+", "_", hint).strip("_") or "value"
    if name[0].isdigit():
        name = f"value_{name}"
    return f"{name}_" if keyword.iskeyword(name) else name


def on_one_line(text: str) -> str:
    """
    >>> print(on_one_line("layers.new" + chr(10) + "line"))
    layers.new\\nline
    """
    return repr(text)[1:-1]


def in_docstring(text: str) -> str:
    """Escape a text for a string in three quotes.

    >>> in_docstring("layers.odd" + 3 * chr(34))
    'layers.odd\\\\"\\\\"\\\\"'
    """
    return on_one_line(text).replace('"', '\\"')


def stem(name: str) -> str:
    """Return a node's name without the number that makes it unique in its graph, so that equal layers have equal names.

    >>> stem("_to_copy_12"), stem("attention_default_2"), stem("mm")
    ('to_copy', 'attention', 'mm')
    """
    return re.sub(r"(_\d+)+$", "", name).removesuffix("_default").strip("_") or "value"


def wrapped(line: str) -> Iterator[str]:
    """Yield a line of code, broken inside brackets into lines of at most `WIDTH` columns if possible."""
    if len(line) <= WIDTH or line.lstrip().startswith("#"):
        yield line
        return
    indent = " " * (len(line) - len(line.lstrip()))
    targets, equals, call = line.strip().partition(" = ")
    if equals and ", " in targets and "(" not in targets and len(targets) > WIDTH // 2:
        line = f"{indent}({targets}) = {call}"
    elif targets.startswith("return ") and ", " in targets:
        line = f"{indent}return ({line.strip().removeprefix('return ')})"
    text = _with_fixed_spaces(line.strip())
    lines = textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=f"{indent}        ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    yield from (piece.replace(_FIXED_SPACE, " ") for piece in lines)


def _with_fixed_spaces(text: str) -> str:
    """Replace the spaces at which a line of code is not broken: outside brackets, in subscripts, in strings, in method calls.

    Such a call, `x.reshape(2, 3)`, is short, and several may follow each other.
    """
    characters: list[str] = []
    groups: list[bool] = []  # of the open brackets: whether the line may be broken inside
    quote, is_escaped = "", False
    for position, character in enumerate(text):
        was_escaped, is_escaped = is_escaped, character == "\\" and not is_escaped
        if character in "\"'" and quote in ("", character) and not was_escaped:
            quote = "" if quote else character
        elif not quote and character in _OPENING:
            is_subscript = character == "[" and text[position - 1 : position].isidentifier()
            is_method = character == "(" and re.search(
                r"[\w)\]]\.(?:reshape|transpose|permute|expand|unflatten)$", text[:position]
            )
            groups.append(not is_subscript and not is_method)
        elif not quote and character in _CLOSING:
            groups.pop()
        is_fixed = character == " " and (bool(quote) or not groups or not all(groups))
        characters.append(_FIXED_SPACE if is_fixed else character)
    return "".join(characters)
