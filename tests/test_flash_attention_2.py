"""`attn_implementation="flash_attention_2"` through transformers: exact, streaming where Dynamo makes one graph of it.

Of models that `enable` wraps, what layers ask of the numbers of positions is answered before the call, and asserted.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from torch import nn
from transformers import modeling_flash_attention_utils as asking

from streamfx.integrations import enable
from streamfx.integrations.packing import IS_PACKED
from streamfx.torch_private.dynamo import record_graph_breaks
from tests.support import hf, layouts
from tests.support.exactness import assert_small, compare, errors, outcome
from tests.support.flash_package import IS_STAND_IN, for_transformers
from tests.support.spread import only
from tests.support.trainers import tiny
from tests.support.trainers.building import build
from tests.support.trainers.running import assert_same_training

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.skipif(not IS_STAND_IN, reason="the package itself is installed, and needs a GPU"),
]

LENGTH = 22


@pytest.fixture(autouse=True, scope="module")
def installed() -> Iterator[None]:
    with for_transformers():
        yield


def of_flash(name: str) -> Any:
    return hf.made(name, "flash_attention_2")


def batch_of(layout: str, batch: int = 1) -> layouts.Batch:
    return layouts.LAYOUTS[layout](layouts.tokens(hf.VOCABULARY, batch, LENGTH))


def told(apart: bool) -> dict[str, Any]:
    """One row of documents, and where they end, as collators tell it: in one tensor or two."""
    given = batch_of("packed_by_positions")
    (ends, _), (longest, _) = asking.prepare_fa_kwargs_from_position_ids(given["position_ids"])
    others = ends.clone() if apart else ends
    more = {"cu_seq_lens_q": ends, "cu_seq_lens_k": others, "max_length_q": int(longest), "max_length_k": int(longest)}
    return {**given, **more}


@pytest.mark.parametrize("name", only(["mistral"], ["mistral", "gemma3"]))
def test_several_sequences_stream(name: str) -> None:
    compare(of_flash(name), batch_of("plain", 2), chunk_size=7, also=(16,), attention=hf.verdicts(name))


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_the_stand_in_matches_eager_attention(name: str) -> None:
    for given in (batch_of("plain", 2), batch_of("packed_by_positions")):
        found, wanted = (hf.made(name, attention)(**given).logits for attention in ("flash_attention_2", "eager"))
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.long
def test_padding_is_exact() -> None:
    """Each layer counts the rows that are no padding, which breaks the graph there: exact, in pieces."""
    compare(of_flash("llama"), batch_of("left_padding", 3), chunk_size=7, streams=None, graphs=None)


# -- models that are enabled


GIVEN: dict[str, Any] = {
    "one document": lambda: batch_of("plain"),
    "positions": lambda: {**batch_of("plain"), "position_ids": torch.arange(3, 25)[None]},
    "documents": lambda: batch_of("packed_by_positions"),
    "ends": lambda: told(apart=False),
    "ends, twice": lambda: told(apart=True),
}


@pytest.mark.parametrize("kind", only(["ends"], GIVEN))
def test_an_enabled_model_is_one_graph(kind: str) -> None:
    model, given = of_flash("llama"), GIVEN[kind]()
    others = given.get("cu_seq_lens_k")
    truth = outcome(model, model, given)
    with enable(model, chunk_size=7, loss_chunk_size=7, outputs="dense", strict=True), record_graph_breaks() as breaks:
        found = errors(outcome(model, model, given), truth)
    assert_small(found, 1e-12, "enabled")
    assert not breaks and given.get("cu_seq_lens_k") is others


@pytest.mark.long
def test_one_document_and_several_share_two_graphs() -> None:
    """Two graphs: one for rows of one document, one for all numbers of documents."""
    model = of_flash("llama")
    calls = [batch_of(layout) for layout in ("plain", "packed_by_positions", "plain")]
    calls += [{**calls[1], "position_ids": torch.arange(22)[None] % size} for size in (11, 9, 30)]
    with torch.no_grad():
        wanted = [model(**given).loss for given in calls]
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with enable(model, chunk_size=7):
        found = [model(**given).loss for given in calls]
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - compiled <= 3  # the second for other positions


def test_positions_that_a_model_computes_itself_raise() -> None:
    """A model that finds other documents than the call was given is no silent mistake."""
    model = of_flash("llama")

    def separate(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "position_ids": torch.arange(22)[None] % 11}

    model.model.register_forward_pre_hook(separate, with_kwargs=True)
    with enable(model, chunk_size=7), pytest.raises(RuntimeError, match="pass position_ids"):
        model(**batch_of("plain")).loss.backward()


@pytest.mark.long
def test_trl_packing_has_no_graph_break(tmp_path: Path) -> None:
    """Documents of several rows in one, which the trainer's own collator describes."""
    pytest.importorskip("trl")

    def trainer() -> Any:
        model = tiny.causal_model(attn_implementation="flash_attention_2").bfloat16()
        return build("sft", tmp_path, model=model, packing=True, max_length=48)

    with record_graph_breaks() as breaks:
        assert_same_training(trainer, tolerance=3e-2)
    assert not breaks


def test_disabling_restores_the_packing_check() -> None:
    before = getattr(asking, IS_PACKED)
    one, other = (enable(of_flash("llama"), chunk_size=7) for _ in range(2))
    assert getattr(asking, IS_PACKED) is not before
    assert bool(getattr(asking, IS_PACKED)(batch_of("packed_by_positions")["position_ids"], 1)), "eager calls ask as before"
    one.disable()
    one.disable()
    assert getattr(asking, IS_PACKED) is not before
    other.disable()
    assert getattr(asking, IS_PACKED) is before
    with enable(hf.made("llama", "sdpa"), chunk_size=7):
        assert getattr(asking, IS_PACKED) is before
