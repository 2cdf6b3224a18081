"""Decoders of other packages: exact, and every attention, MLP and head streams."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

from tests.packages.checking import check
from tests.packages.torch_decoders import BREAKS, DECODERS

pytestmark = pytest.mark.long

x_decoders: Any = pytest.importorskip("x_transformers") and import_module("tests.packages.x_decoders")


def lit_decoders() -> Any:
    """litgpt asks for an older huggingface_hub than transformers does: it is installed apart, where somebody did so."""
    pytest.importorskip("litgpt", reason="pip install --no-deps -r tests/packages/without-dependencies.txt")
    return import_module("tests.packages.lit_decoders")


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


@pytest.mark.parametrize("name", ["gemma 2", "phi", "falcon", "olmo 2"])
def test_litgpt(name: str) -> None:
    check(*lit_decoders().DECODERS[name])


def test_experts_of_litgpt() -> None:
    """A loop over experts with as many rows as each was given: each piece between breaks of the graph streams."""
    with torch._dynamo.config.patch(recompile_limit=64):
        check(lit_decoders().EXPERTS, graphs=None)
