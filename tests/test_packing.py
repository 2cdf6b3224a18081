"""Enabled models with flash attention: what layers ask of the numbers of positions is answered before the call, and asserted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
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
from tests.support.trainers import tiny
from tests.support.trainers.building import build
from tests.support.trainers.running import assert_same_training

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


@pytest.mark.parametrize("apart", [False, True], ids=["one tensor", "two"])
def test_ends_that_are_given(apart: bool) -> None:
    """As collators give them: for rows and for keys."""
    given, model = batch_of("packed_by_positions"), hf.made("llama", "flash_attention_2")
    (ends, _), (longest, _) = asking.prepare_fa_kwargs_from_position_ids(given["position_ids"])
    others = ends.clone() if apart else ends
    told = {"cu_seq_lens_q": ends, "cu_seq_lens_k": others, "max_length_q": int(longest), "max_length_k": int(longest)}
    assert not breaks_of(model, {**given, **told})
    assert told["cu_seq_lens_k"] is others


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


def test_heads_in_single_precision() -> None:
    """Under autocast positions are turned in float32: transformers warns in each layer, and casts."""
    model, given = hf.made("llama", "flash_attention_2").float(), batch_of("plain")

    def step() -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**given).loss
        return list(torch.autograd.grad(loss, list(model.parameters())))

    wanted = step()
    with enable(model, chunk_size=7, loss_chunk_size=7, strict=True), noted_graph_breaks() as breaks:
        found = step()
    assert not breaks
    for one, other in zip(found, wanted, strict=True):
        assert float((one - other).norm() / other.norm()) < 0.05


@pytest.mark.long
def test_packing_of_trl(tmp_path: Path) -> None:
    """Documents of several rows in one, which the trainer's own collator describes."""
    pytest.importorskip("trl")
    arguments = {"packing": True, "max_length": 48}

    def trainer() -> Any:
        model = tiny.causal_model(attn_implementation="flash_attention_2").bfloat16()
        return build("sft", tmp_path, model=model, **arguments)

    with noted_graph_breaks() as breaks:
        assert_same_training(trainer, tolerance=3e-2)
    assert not breaks


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
