"""Random decoders are exact. On demand, thousands: `--long`, or `python -m tests.random_decoders --count 5000`."""

from __future__ import annotations

from random import Random

import pytest

from tests.random_decoders.checking import failure_of, smallest
from tests.random_decoders.kinds import KINDS, draw_kind
from tests.random_decoders.program import program
from tests.random_decoders.specification import Decoder, Layer, draw, sensible, shrunk, simpler
from tests.support.spread import spread

EACH = 10
FOUND: dict[str, tuple[int, ...]] = {  # by the number of the kind, see kinds.py: what was wrong before each was mended
    "1": (6, 18),
    "2": (6, 9),
    "3": (6, 18),
    "4": (0, 12),
    "5": (0,),
    "6": (1, 2),
    "8": (9,),
    "9": (1, 3, 4),
    "10": (0, 1),
    "11": (1, 3, 4),
    "12": (0,),
    "places": (3, 8, 13),
    "ends": (1, 6, 8),
    "pairs": (1, 12, 16),
    "looked up": (0, 1, 7),
    "over keys": (1, 6, 22),
    "numbers": (2, 4),
    "few": (1, 22, 33, 42),
    "halves": (6, 8, 17),
    "views": (0, 1),
    "bytes": (4,),
    "apart": (2, 5, 8, 10, 26),
    "asserted": (0, 1, 8),
    "features": (32, 34, 36),
    "stages": (0, 1, 2),
    "whole": (0, 1, 2),
    "scans": (1, 0, 2),
    "states": (1, 0, 2, 3),
    "associative": (3, 1, 11, 16),
    "shifted": (2, 5, 0),
    "joined": (2, 4, 5),
    "tables": (0, 1, 18, 23, 17),
    "orders": (22, 11, 9, 19, 3),
    "loops": (7, 11, 19, 6),
    "squares": (21, 52, 6),
    "decays": (1, 3, 0, 5),
    "compressed": (49, 28, 32, 12, 7),
    "buffers": (2, 3, 6, 9, 14),
    "alone": (101, 7),
    "cut out": (0, 1),
    "known early": (0, 1),
    "recomputed": (17, 4),  # of which the loops took more memory
    "split": (19, 0),  # what the second part reads without a gradient
}


def assert_exact(numbers: range, *kinds: str) -> None:
    for number in numbers:
        failure = failure_of(draw_kind(Random(number), kinds))
        assert failure is None, f"decoder {number} of {kinds or 'any kind'}, made smaller: {smallest(failure)}"


@pytest.mark.parametrize("first", spread(range(0, 20, EACH), 2))
def test_is_exact(first: int) -> None:
    assert_exact(range(first, first + EACH))


FIRST = [(kind, FOUND[kind][0]) for kind in KINDS]
OTHERS = [pytest.param(kind, number, marks=pytest.mark.long) for kind in KINDS for number in FOUND[kind][1:]]


@pytest.mark.parametrize(("kind", "number"), [*FIRST, *OTHERS])
def test_of_each_kind_some_are_exact(kind: str, number: int) -> None:
    """Numbers that were wrong before the fault of their kind was mended, and a few more."""
    assert_exact(range(number, number + 1), kind)


@pytest.mark.long
@pytest.mark.parametrize("first", range(60, 5060, 10 * EACH))
def test_many_are_exact(first: int) -> None:
    assert_exact(range(first, first + 10 * EACH))


def test_drawing_depends_on_the_seed_alone() -> None:
    assert draw(Random(4)) == draw(Random(4)) != draw(Random(5))


def test_programs_are_python() -> None:
    for number in range(100):
        compile(program(draw(Random(number))), "<program>", "exec")


def test_a_failure_shrinks_to_what_it_needs() -> None:
    """Whatever else was drawn, the ingredient at fault alone is left."""
    begin = sensible(Decoder(layers=(Layer(core="matmul", mask="window", mlp="gated"), Layer(core="linear")), length=11, heads=4))

    def fails(decoder: Decoder) -> bool:
        return any(layer.mask == "window" for layer in decoder.layers) and decoder.length > 2

    assert shrunk(begin, fails) == Decoder(layers=(Layer(core="boolean", mask="window"),), length=4)


def test_simpler_decoders_are_sensible() -> None:
    decoder = draw(Random(7))
    assert all(other == sensible(other) for other in simpler(decoder))
