"""Decoders of other packages, and tiny models of all model types of transformers, are exact; most stream in all stages."""

from importlib import import_module
from typing import Any

import pytest

from tests.packages.checking import check
from tests.packages.torch_decoders import BREAKS, DECODERS
from tests.support.tables import named_cases
from tests.zoo.measure import measured
from tests.zoo.models import grouped_products_in_float64, model_types

pytest.importorskip("transformers")

pytestmark = pytest.mark.long

x_decoders: Any = pytest.importorskip("x_transformers") and import_module("tests.packages.x_decoders")


@pytest.mark.parametrize("name", x_decoders.DECODERS)
def test_decoders_of_x_transformers_stream(name: str) -> None:
    check(x_decoders.DECODERS[name], {x_decoders.ATTENTION.get(name, "causal")})


def test_an_encoder_with_a_decoder_is_exact() -> None:
    """The decoder streams; its cross attention has all of the encoder's rows as keys."""
    check(x_decoders.encoder_and_decoder, all_streams=False, streams=None)


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_of_torch_stream(name: str) -> None:
    check(DECODERS[name])


def test_a_mask_that_torch_reads_is_exact() -> None:
    """The layers run in eager: Dynamo compiles no frame of torch's modules."""
    check(BREAKS, all_streams=False, graphs=None)


# -- tiny models of all model types of transformers

# one model per kind of attention, which must stream
STREAMS = named_cases("streams", globals())


@pytest.mark.parametrize("name", model_types())
def test_model_types_are_exact(name: str) -> None:
    grouped_products_in_float64()
    row = measured(name)
    if row["status"] in ("not built", "not traced") and name not in STREAMS:
        pytest.skip(row["error"])
    assert row["status"] == "exact" and not row["failed"], row
    if name in STREAMS:
        assert not row["reasons"] and row["share"] == 1 and STREAMS[name] <= set(row["attention"]), row
