"""Functions with gradients that they define, as text of programs: what becomes of a gradient on its way, and terms' functions."""

from tests.random_decoders.tables import TEMPLATES, Table, expressions, tables

_TEXT = tables("gradients.txt")
BENDS = expressions(_TEXT["bends"])


def _function(name: str, *lines: str) -> str:
    """A function; its backward begins after the first line that returns."""
    end = next(number for number, line in enumerate(lines, 1) if line.startswith("return "))
    forward, backward = ("\n        ".join(part) for part in (lines[:end], lines[end:]))
    return TEMPLATES["function"].format(name=name, forward=forward, backward=backward)


_NAMES = {term: f"Known{number}" for number, term in enumerate(_TEXT["of rows"])}
FUNCTIONS = {name: _function(name, *lines) for name, lines in _TEXT["functions"].items()} | {
    _NAMES[term]: _function(_NAMES[term], *lines) for term, lines in _TEXT["of rows"].items()
}
KNOWN_EARLY: Table = {
    f"{term} in a gradient{suffix}": (f"y = {name}.apply(x.sin())", f"term = ({used.format(name=name)}).square().mean()")
    for term, name in _NAMES.items()
    for suffix, used in (("", "y"), (", twice", "{name}.apply(y.cos()) * y"))
}


def bend(name: str) -> str:
    """The function that passes its input, and bends its gradient."""
    return "" if name == "none" else _function("Bend", "return x.clone()", f"return {BENDS[name]}")
