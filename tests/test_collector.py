"""The garbage collector rests while a step is traced."""

import gc

from streamfx.collector import collected, uncollected


def test_it_rests_inside_but_for_what_a_search_leaves() -> None:
    with uncollected():
        with uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled()
        with collected():
            assert gc.isenabled()
            with uncollected():
                assert not gc.isenabled()
            assert gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_works_again_whoever_ends_first() -> None:
    first, second = uncollected(), uncollected()
    for context in (first, second):
        context.__enter__()
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
