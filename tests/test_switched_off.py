"""Where `torch.compile` is switched off nothing is compiled, and that is what is said."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import streamfx
from tests.support.small import Causal, tokens

pytestmark = pytest.mark.compiled

IDS = tokens(2, 32)


@contextmanager
def by_environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        yield


SWITCHES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "TORCHDYNAMO_DISABLE": by_environment,
    "config.disable": lambda: torch._dynamo.config.patch(disable=True),
    "force_eager": lambda: torch.compiler.set_stance("force_eager"),
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_calls_are_counted_as_what_they_are(switch: str, caplog: pytest.LogCaptureFixture) -> None:
    model, off = Causal(), SWITCHES[switch]
    with off():
        done = streamfx.enable(model, chunk_size=8)
        assert "nothing is compiled, because torch.compile is switched off: unset TORCHDYNAMO_DISABLE" in caplog.text
        model(IDS, IDS).backward()
        assert "nothing is compiled: torch.compile is switched off" in str(done)
        assert "0 calls through streambp, 1 in eager" in str(done) and not done.compiled
    model(IDS, IDS).backward()
    stays = off is by_environment  # what torch.compile has given back as it was
    assert ("0 calls through streambp, 2" if stays else "1 calls through streambp, 1") + " in eager" in str(done)
    assert ("switched off" in str(done)) == stays


@pytest.mark.parametrize("switch", SWITCHES)
def test_what_is_switched_off_later_is_counted_too(switch: str) -> None:
    model = Causal()
    done = streamfx.enable(model, chunk_size=8)
    model(IDS, IDS).backward()
    assert "1 calls through streambp, 0 in eager" in str(done) and "switched off" not in str(done)
    with SWITCHES[switch]():
        model(IDS, IDS).backward()
        assert "1 calls through streambp, 1 in eager" in str(done) and "switched off" in str(done)


@pytest.mark.parametrize("look", [streamfx.explain, streamfx.verify])
@pytest.mark.parametrize("switch", SWITCHES)
def test_explain_and_verify_say_so(switch: str, look: Callable[..., Any]) -> None:
    error = {streamfx.explain: streamfx.NotTracedError, streamfx.verify: streamfx.NotComparableError}[look]
    with SWITCHES[switch](), pytest.raises(error, match=r"(?s)torch.compile is switched off.*TORCHDYNAMO_DISABLE.*force_eager"):
        look(Causal(), IDS, IDS, chunk_size=8)


def test_a_part_of_a_model_is_not_called_the_whole() -> None:
    """A layer, say: whether what was given is a whole model, nobody knows."""
    told = str(streamfx.enable(nn.Linear(4, 4)))
    assert "full model" not in told and "model (Linear): its forward" in told
