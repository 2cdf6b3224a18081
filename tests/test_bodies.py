"""Loop bodies compiled by Inductor: the same gradients as bodies that are interpreted."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.support import decoders, layouts
from tests.support.exactness import compare
from tests.support.small import Causal, tokens

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="Inductor needs a C++ compiler")


@needs_compiler
def test_small_decoder() -> None:
    """Chunks of two sizes, and the last one shorter."""
    model, ids = Causal().double(), tokens(2, 11)
    compare(model, (ids, ids), chunk_size=4, bodies="inductor", attention={"causal"}, streams=True)


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize("make", [decoders.Plain, decoders.Triangle, decoders.Window], ids=lambda make: make.__name__)
def test_decoders(make: Callable[[], nn.Module]) -> None:
    ids = layouts.tokens(decoders.VOCABULARY, 2, 19)
    for chunk_size in (7, 16):
        torch._dynamo.reset()
        compare(decoders.made(make), {"ids": ids, "labels": ids}, chunk_size=chunk_size, bodies="inductor", streams=True)
