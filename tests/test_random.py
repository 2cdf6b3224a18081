"""Random decoders are exact. On demand, thousands: `--long`, or `python -m tests.random_decoders --count 5000`."""

from __future__ import annotations

from dataclasses import make_dataclass

import pytest

from tests.random_decoders.checking import failure_of, smallest
from tests.random_decoders.choices import Choices
from tests.random_decoders.found import FOUND
from tests.random_decoders.kinds import KINDS, numbered
from tests.random_decoders.program import needed
from tests.random_decoders.specification import Chosen, Decoder, Layer, choice, draw, drawn, sensible, shrunk, simpler
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


def test_a_new_field_changes_no_other_field() -> None:
    """A layer with one field more in front of the others, and one value more of the masks."""
    fields = {name: Layer.__dataclass_fields__[name].metadata["values"] for name in ("core", "mask")}
    values = {"new": ("a", "b"), "core": fields["core"], "mask": ("new", *fields["mask"])}
    one_more = make_dataclass("OneMore", [(name, str, choice(*values[name])) for name in values], bases=(Chosen,), frozen=True)
    both = [(drawn(Layer, Choices(f"{n}")), drawn(one_more, Choices(f"{n}"))) for n in range(200)]
    assert all(old["core"] == new["core"] and new["mask"] in (old["mask"], "new") for old, new in both)
    assert 0 < sum(new["mask"] == "new" for _, new in both) < 40
    assert len({str(draw(Choices(f"{n}"))) for n in range(20)}) == 20 and draw(Choices("4")) == draw(Choices("4"))


def test_recorded_decoders_are_consistent() -> None:
    """Each of their fields has a meaning beside the others, and their text is all there is to them."""
    kept = [decoder for decoders in FOUND.values() for decoder in decoders]
    assert FOUND.keys() == KINDS.keys() and all(FOUND.values()) and len(set(kept)) == len(kept)
    assert [str(decoder) for decoder in kept if sensible(decoder) != decoder] == []
    assert eval(repr(kept)) == kept


def test_simpler_decoders_are_consistent() -> None:
    """Two numbers have the norm "rms" for "layer", too."""
    assert all(other == sensible(other) for other in simpler(numbered(7)))
    assert needed(Decoder(layers=(Layer(norm="rms"),), also=4)) == Decoder(layers=(Layer(norm="layer"),), also=4)
