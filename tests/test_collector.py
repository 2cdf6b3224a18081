"""The garbage collector rests while a step is traced."""

import gc
import traceback

import torch

from streamfx.collector import collected, uncollected


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


def test_it_rests_while_a_step_is_compiled() -> None:
    seen: list[bool] = []
    linear = torch.nn.Linear(8, 8)

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        return linear(x).square().mean()

    def noted(phase: str, info: dict[str, int]) -> None:
        seen.append("_compile" in {frame.name for frame in traceback.extract_stack() if frame.filename.endswith("backend.py")})

    gc.callbacks.append(noted)
    try:
        torch.compile(loss_of, backend="streambp", options={"chunk_size": 16})(torch.randn(2, 64, 8)).backward()
    finally:
        gc.callbacks.remove(noted)
    assert gc.isenabled() and not any(seen)
