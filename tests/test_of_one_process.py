"""What holds graphs of its process is not pickled or copied by accident: an error says what to keep instead."""

from __future__ import annotations

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


def explained() -> Any:
    return streamfx.explain(Causal(), IDS, IDS, chunk_size=4)


def profiled() -> Any:
    with streamfx.profile() as profile:
        torch.zeros(8)
    return profile


MADE: dict[str, tuple[Callable[[], Any], str]] = {
    "an Explanation": (explained, "keep summary(), which is a dictionary, or the page"),
    "a Profile": (profiled, "keep summary(), which is a dictionary, or the trace"),
    "an EnabledModules": (lambda: streamfx.enable(Causal(), chunk_size=4), "streamfx.enable(copy, **enabled.options)"),
}


@pytest.mark.parametrize("name", MADE)
def test_what_to_keep_instead_is_said(name: str) -> None:
    make, keep = MADE[name]
    for kept in (pickle.dumps, copy.deepcopy):
        with pytest.raises(NotCopyableError) as refused:
            kept(make())
        assert refused.value.asked == f"{name} is neither pickled nor copied" and keep in refused.value.do
        assert isinstance(refused.value, TypeError)


def test_what_is_to_be_kept_can_be() -> None:
    """And a model that is enabled is copied as any other."""
    summary = explained().summary()
    assert pickle.loads(pickle.dumps(summary)) == copy.deepcopy(summary) == summary
    model = Causal()
    with streamfx.enable(model, chunk_size=4):
        model(IDS, IDS).backward()
        assert torch.equal(copy.deepcopy(model)(IDS, IDS), model(IDS, IDS))
