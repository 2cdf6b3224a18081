"""Decoders of other packages: exact, and every attention, MLP and head streams."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from tests.packages.checking import check
from tests.packages.torch_decoders import BREAKS, DECODERS

pytestmark = pytest.mark.long

x_decoders: Any = pytest.importorskip("x_transformers") and import_module("tests.packages.x_decoders")


@pytest.mark.parametrize("name", x_decoders.DECODERS)
def test_x_transformers(name: str) -> None:
    check(x_decoders.DECODERS[name], {x_decoders.ATTENTION.get(name, "causal")})


def test_encoder_and_decoder() -> None:
    """The decoder streams, with all of the encoder's rows as keys of its cross attention."""
    check(x_decoders.encoder_and_decoder, all_streams=False, streams=None)


@pytest.mark.parametrize("name", DECODERS)
def test_torch(name: str) -> None:
    check(DECODERS[name])


def test_a_mask_that_torch_looks_at() -> None:
    """The layers run eagerly: Dynamo compiles no frame of torch's own modules. What is compiled around them is exact."""
    check(BREAKS, all_streams=False, graphs=None)
