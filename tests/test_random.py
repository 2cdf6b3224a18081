"""Random decoders are exact. On demand, thousands: `--long`, or `python -m tests.random_decoders --count 5000`."""

import pytest

from tests.random_decoders.checking import failure_of, smallest
from tests.random_decoders.found import FOUND
from tests.random_decoders.kinds import KINDS, numbered
from tests.random_decoders.program import needed
from tests.random_decoders.specification import Decoder, Layer, sensible, shrunk, simpler
from tests.support.spread import only


def assert_exact(*decoders: Decoder) -> None:
    for decoder in decoders:
        failure = failure_of(decoder)
        assert failure is None, f"{decoder}, made smaller: {smallest(failure)}"


@pytest.mark.compiled
@pytest.mark.parametrize("numbers", only([range(5)], [range(5), *(range(n, n + 100) for n in range(5, 5005, 100))]), ids=str)
def test_random_decoders_are_exact(numbers: range) -> None:
    assert_exact(*map(numbered, numbers))


def test_a_failure_shrinks_to_its_cause() -> None:
    """Whatever else was drawn, the ingredient at fault alone is left."""
    begin = sensible(Decoder(layers=(Layer(core="matmul", mask="window", mlp="gated"), Layer(core="linear")), length=11, heads=4))

    def fails(decoder: Decoder) -> bool:
        return any(layer.mask == "window" for layer in decoder.layers) and decoder.length > 2

    small = shrunk(begin, fails)
    assert small == Decoder(layers=(Layer(core="boolean", mask="window"),), length=4)
    assert repr(small) == "Decoder(layers=(Layer(core='boolean', mask='window'),))"


KEPT = [(kind, place) for kind in KINDS for place in range(len(FOUND[kind]))]


@pytest.mark.compiled
@pytest.mark.parametrize(("kind", "place"), only([(kind, 0) for kind in [*KINDS][::6]], KEPT))
def test_decoders_that_failed_once_are_exact(kind: str, place: int) -> None:
    assert_exact(FOUND[kind][place])


def test_an_unknown_value_is_refused() -> None:
    with pytest.raises(ValueError, match="Layer has no mask='windows'"):
        Layer(mask="windows")
    with pytest.raises(ValueError, match="Decoder has no length=99"):
        Decoder(length=99)


def test_recorded_decoders_are_consistent() -> None:
    """Each field has an effect, and the text determines the decoder."""
    kept = [decoder for decoders in FOUND.values() for decoder in decoders]
    assert FOUND.keys() == KINDS.keys() and all(FOUND.values()) and len(set(kept)) == len(kept)
    assert [str(decoder) for decoder in kept if sensible(decoder) != decoder] == []
    assert eval(repr(kept)) == kept


def test_simpler_decoders_are_consistent() -> None:
    """Two numbers have the norm "rms" for "layer", too."""
    assert all(other == sensible(other) for other in simpler(numbered(7)))
    assert needed(Decoder(layers=(Layer(norm="rms"),), also=4)) == Decoder(layers=(Layer(norm="layer"),), also=4)
