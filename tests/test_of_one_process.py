"""Objects that hold graphs of their process cannot be pickled or copied; the error says what to keep instead."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import streamfx
from streamfx.errors import NotCopyableError
from tests.support.small import Causal, tokens

pytestmark = pytest.mark.compiled

IDS = tokens(2, 12)


def profiled() -> Any:
    with streamfx.profile() as profile:
        torch.zeros(8)
    return profile


OBJECTS: dict[str, tuple[Callable[[], Any], str]] = {
    "an Explanation": (
        lambda: streamfx.explain(Causal(), IDS, IDS, chunk_size=4),
        "keep summary(), which is a dictionary, or the page",
    ),
    "a Profile": (profiled, "keep summary(), which is a dictionary, or the trace"),
    "an EnabledModules": (lambda: streamfx.enable(Causal(), chunk_size=4), "streamfx.enable(copy, **enabled.options)"),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_the_error_names_an_alternative(name: str) -> None:
    make, keep = OBJECTS[name]
    held = make()
    for kept in (pickle.dumps, copy.deepcopy):
        with pytest.raises(NotCopyableError) as refused:
            kept(held)
        assert refused.value.asked == f"{name} cannot be pickled or copied" and keep in refused.value.do
        assert isinstance(refused.value, TypeError)
    if name == "an Explanation":
        summary = held.summary()
        assert pickle.loads(pickle.dumps(summary)) == copy.deepcopy(summary) == summary


def test_an_enabled_model_can_be_copied() -> None:
    model = Causal()
    with streamfx.enable(model, chunk_size=4):
        model(IDS, IDS).backward()
        torch.testing.assert_close(copy.deepcopy(model)(IDS, IDS), model(IDS, IDS))
