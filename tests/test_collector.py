"""The garbage collector rests while a step is traced."""

import gc

from streamfx.planner.collector import uncollected


def test_the_collector_goes_on_as_before() -> None:
    assert gc.isenabled()
    with uncollected():
        with uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
