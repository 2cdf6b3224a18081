"""Decoders of other packages: exact, and every attention, MLP and head streams. A spread each time, all with --long."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

from tests.packages import torch_decoders
from tests.packages.checking import BOUND, check, double, unsettle
from tests.support.exactness import compare
from tests.support.spread import only

pytestmark = pytest.mark.long

x_decoders: Any = pytest.importorskip("x_transformers") and import_module("tests.packages.x_decoders")


def lit_decoders() -> Any:
    """litgpt asks for an older huggingface_hub than transformers does: it is installed apart, where somebody did so."""
    pytest.importorskip("litgpt", reason="pip install --no-deps -r tests/packages/without-dependencies.txt")
    return import_module("tests.packages.lit_decoders")


@pytest.mark.parametrize("name", only(["forgetting"], x_decoders.SPREAD))
def test_x_transformers(name: str) -> None:
    check(*x_decoders.SPREAD[name])


@pytest.mark.long
@pytest.mark.parametrize("name", x_decoders.MORE)
def test_more_of_x_transformers(name: str) -> None:
    check(*x_decoders.MORE[name])


@pytest.mark.long
@pytest.mark.parametrize("name", x_decoders.PAIRS)
def test_encoder_and_decoder(name: str) -> None:
    """The decoder streams, with all of the encoder's rows as keys of its cross attention."""
    with double():
        model, inputs = x_decoders.PAIRS[name]()
        unsettle(model)
        compare(model, inputs, streams=None, tolerance=BOUND)


@pytest.mark.parametrize("name", only(["decoder"], torch_decoders.SPREAD))
def test_torch(name: str) -> None:
    build, _ = torch_decoders.SPREAD[name]
    check(build)


@pytest.mark.long
@pytest.mark.parametrize("name", torch_decoders.MORE)
def test_more_of_torch(name: str) -> None:
    build, _ = torch_decoders.MORE[name]
    check(build)


def test_a_mask_that_torch_looks_at() -> None:
    """The layers run eagerly: Dynamo compiles no frame of torch's own modules. What is compiled around them is exact."""
    with double():
        model, inputs = torch_decoders.BREAKS()
        unsettle(model)
        compare(model, inputs, graphs=None, tolerance=BOUND)


@pytest.mark.parametrize("name", ["gemma 2", "phi"])
def test_litgpt(name: str) -> None:
    check(*lit_decoders().SPREAD[name])


@pytest.mark.long
@pytest.mark.parametrize("name", ["falcon", "gemma 3", "llama", "olmo 2", "pythia", "qwen 3"])
def test_more_of_litgpt(name: str) -> None:
    check(*lit_decoders().MORE[name])


@pytest.mark.long
def test_experts_of_litgpt() -> None:
    """A loop over experts with as many rows as each was given: each piece between breaks of the graph streams."""
    with torch._dynamo.config.patch(recompile_limit=64):
        check(lit_decoders().EXPERTS, graphs=None)


def test_all_of_litgpt_is_run() -> None:
    assert {*lit_decoders().SPREAD, *lit_decoders().MORE} == {
        *("gemma 2", "phi"),
        *("falcon", "gemma 3", "llama", "olmo 2", "pythia", "qwen 3"),
    }
