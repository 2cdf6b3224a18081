"""The garbage collector rests while a step is traced."""

import gc

from streamfx.frontend.gc_pause import collected, uncollected


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


def test_it_works_again_whoever_ends_first_and_stays_off_where_it_was_off() -> None:
    first, second = uncollected(), uncollected()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()
    gc.disable()
    with uncollected(), collected():
        assert not gc.isenabled()
    assert not gc.isenabled()
    gc.enable()
