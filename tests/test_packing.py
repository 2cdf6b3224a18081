"""Enabled models with flash attention: what layers ask of the numbers of positions is answered before the call, and asserted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from torch import Tensor, nn
from transformers import modeling_flash_attention_utils as asking

from streamfx.integrations import enable
from streamfx.integrations.packing import IS_PACKED
from streamfx.torch_private.dynamo import noted_graph_breaks
from tests.support import hf, layouts
from tests.support.exactness import assert_small, errors, outcome
from tests.support.flash_package import IS_STAND_IN, for_transformers

pytestmark = pytest.mark.skipif(not IS_STAND_IN, reason="the package itself is installed, and needs a GPU")


@pytest.fixture(autouse=True, scope="module")
def installed() -> Iterator[None]:
    with for_transformers():
        yield


def batch_of(layout: str) -> layouts.Batch:
    return layouts.LAYOUTS[layout](layouts.tokens(hf.VOCABULARY, 1, 22))


def breaks_of(model: nn.Module, given: dict[str, Any]) -> list[Any]:
    """Where the graph of an enabled model's step breaks; the step is eager's."""
    truth = outcome(model, model, given)
    with enable(model, chunk_size=7, loss_chunk_size=7, outputs="dense", strict=True), noted_graph_breaks() as breaks:
        found = errors(outcome(model, model, given), truth)
    assert_small(found, 1e-12, "enabled")
    return breaks


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_one_document_is_one_graph(name: str) -> None:
    assert not breaks_of(hf.made(name, "flash_attention_2"), batch_of("plain"))


def test_positions_that_are_given() -> None:
    given = batch_of("plain")
    positions = torch.arange(3, 25)[None]
    assert not breaks_of(hf.made("llama", "flash_attention_2"), {**given, "position_ids": positions})


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_documents_are_one_graph(name: str) -> None:
    assert not breaks_of(hf.made(name, "flash_attention_2"), batch_of("packed_by_positions"))


def test_the_same_model_with_one_document_and_several() -> None:
    """Two graphs: one for rows of one document, one for all numbers of documents."""
    model = hf.made("llama", "flash_attention_2")
    calls = [batch_of(layout) for layout in ("plain", "packed_by_positions", "plain")]
    calls += [{**calls[1], "position_ids": torch.arange(22)[None] % size} for size in (11, 9, 30)]
    with torch.no_grad():
        wanted = [model(**given).loss for given in calls]
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with enable(model, chunk_size=7):
        found = [model(**given).loss for given in calls]
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - compiled <= 3  # the second for other positions


@pytest.mark.parametrize("layout", ["plain", "packed_by_positions"])
def test_positions_of_the_models_own(layout: str) -> None:
    """A model that finds other documents than the call was given is no silent mistake."""
    model = hf.made("llama", "flash_attention_2")
    inner: Any = model.model

    def separate(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "position_ids": torch.arange(22)[None] % 11}

    inner.register_forward_pre_hook(separate, with_kwargs=True)
    with enable(model, chunk_size=7), pytest.raises(RuntimeError, match="give the call the position_ids"):
        model(**batch_of(layout)).loss.backward()


def test_the_question_is_put_back() -> None:
    before = getattr(asking, IS_PACKED)
    models = [hf.made("llama", "flash_attention_2") for _ in range(2)]
    one, other = (enable(model, chunk_size=7) for model in models)
    assert getattr(asking, IS_PACKED) is not before
    packed: Tensor = batch_of("packed_by_positions")["position_ids"]
    assert bool(getattr(asking, IS_PACKED)(packed, 1)), "eager calls ask as before"
    one.disable()
    one.disable()
    assert getattr(asking, IS_PACKED) is not before
    other.disable()
    assert getattr(asking, IS_PACKED) is before
    with enable(hf.made("llama", "sdpa"), chunk_size=7):
        assert getattr(asking, IS_PACKED) is before
