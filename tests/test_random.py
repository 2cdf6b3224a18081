"""Random decoders are exact. On demand, thousands: `--long`, or `python -m tests.random_decoders --count 5000`."""

import pytest

from tests.random_decoders.checking import failure_of, smallest
from tests.random_decoders.found import FOUND
from tests.random_decoders.kinds import KINDS, numbered
from tests.random_decoders.specification import Decoder, Layer, sensible  # noqa: F401  (of texts that are evaluated)
from tests.support.scans import ALONG
from tests.support.spread import only


def assert_exact(*decoders: Decoder) -> None:
    for decoder in decoders:
        failure = failure_of(decoder)
        assert failure is None, f"{decoder}, made smaller: {smallest(failure)}"


@pytest.mark.compiled
@pytest.mark.parametrize("numbers", only([range(5)], [range(5), *(range(n, n + 100) for n in range(5, 5005, 100))]), ids=str)
def test_random_decoders_are_exact(numbers: range) -> None:
    assert_exact(*map(numbered, numbers))


KEPT = [(kind, place) for kind in KINDS for place in range(len(FOUND[kind]))]


@pytest.mark.compiled
@pytest.mark.parametrize(("kind", "place"), only([(kind, 0) for kind in [*KINDS][::6]], KEPT))
def test_decoders_that_failed_once_are_exact(kind: str, place: int) -> None:
    if kind == "scans" and not ALONG:
        pytest.skip("torch.compile of 2.11, with any backend: scan might be aliasing the input")
    assert_exact(FOUND[kind][place])


def test_recorded_decoders_are_consistent() -> None:
    """Each field has an effect, and the text determines the decoder."""
    kept = [decoder for decoders in FOUND.values() for decoder in decoders]
    assert FOUND.keys() == KINDS.keys() and all(FOUND.values()) and len(set(kept)) == len(kept)
    assert [str(decoder) for decoder in kept if sensible(decoder) != decoder] == []
    assert eval(repr(kept)) == kept
