"""The garbage collector rests while a step is traced."""

import gc

from streamfx.frontend.gc_pause import collected, uncollected


def test_the_collector_goes_on_as_before() -> None:
    assert gc.isenabled()
    with uncollected():
        with uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_what_a_search_leaves_is_collected_while_it_rests_around() -> None:
    with uncollected():
        with collected():
            assert gc.isenabled()
            with uncollected():
                assert not gc.isenabled()
            assert gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_works_again_whoever_ends_first() -> None:
    first, second = uncollected(), uncollected()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()


def test_it_stays_off_where_it_was_off() -> None:
    gc.disable()
    try:
        with uncollected(), collected():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
