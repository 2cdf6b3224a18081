"""The decoders of found.txt, by kind: they were inexact before a fault was fixed."""

from tests.random_decoders.specification import Decoder, Layer
from tests.random_decoders.tables import tables

_NAMES = {"Decoder": Decoder, "Layer": Layer}
FOUND: dict[str, tuple[Decoder, ...]] = {
    kind: tuple(eval(literal, _NAMES) for literal in literals) for kind, literals in tables("found.txt").items()
}
