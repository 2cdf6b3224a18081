"""Terms added to the loss, as lines of a program: terms.txt and terms_of_blocks.txt, by the kinds of decoders that draw them."""

from tests.random_decoders.gradients import KNOWN_EARLY
from tests.random_decoders.tables import Table, crossed, tables

_TEXT = tables("terms.txt") | tables("terms_of_blocks.txt")
_CROSSED: dict[str, Table] = {
    "over keys": crossed(_TEXT["over keys, functions"], _TEXT["over keys, masks"]),
    "shifted": crossed(_TEXT["shifted, scores"], _TEXT["shifted, uses"]),
    "compressed": crossed(_TEXT["compressed, blocks"], _TEXT["compressed, uses"]),
    "orders": {
        f"{name} of {key}": (*first, *more)
        for key, first in _TEXT["orders, keys"].items()
        for name, more in _TEXT["orders, uses"].items()
    },
}
EXTRAS = _TEXT["extras"]
TERMS: dict[str, Table] = {**_TEXT, **_CROSSED, "known early": KNOWN_EARLY}
LINES: Table = {name: lines for table, terms in TERMS.items() if ", " not in table for name, lines in terms.items()}
PARAMETERS = {"shift": 0, "one": 1, "two": 1, "square": 2, "another": 2}  # by name: how many dimensions of the width
