"""Random decoders are exact. On demand, thousands: `--long`, or `python -m tests.random_decoders --count 5000`."""

from __future__ import annotations

from random import Random

import pytest

from tests.random_decoders.checking import failure_of, smallest
from tests.random_decoders.program import program
from tests.random_decoders.specification import Decoder, Layer, draw, sensible, shrunk, simpler

EACH = 10


def assert_exact(numbers: range) -> None:
    for number in numbers:
        failure = failure_of(draw(Random(number)))
        assert failure is None, f"decoder {number}, made smaller: {smallest(failure)}"


@pytest.mark.parametrize("first", range(0, 60, EACH))
def test_is_exact(first: int) -> None:
    assert_exact(range(first, first + EACH))


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
