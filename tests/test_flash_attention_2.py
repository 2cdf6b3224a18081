"""`attn_implementation="flash_attention_2"` through transformers: exact, streaming where Dynamo makes one graph of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from torch import Tensor, nn

from tests.support import hf, layouts
from tests.support.exactness import Report, compare
from tests.support.flash_package import IS_STAND_IN, for_transformers

pytestmark = pytest.mark.skipif(not IS_STAND_IN, reason="the package itself is installed, and needs a GPU")

LENGTH = 22


@pytest.fixture(autouse=True, scope="module")
def installed() -> Iterator[None]:
    with for_transformers():
        yield


class Packed(nn.Module):
    """A model that is told where documents begin, as `DataCollatorWithFlattening(return_flash_attn_kwargs=True)` tells it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ends: Tensor, others: Tensor | None = None, **given: Any) -> Any:
        others = ends.clone() if others is None else others  # of one tensor in two places Dynamo (2.13) makes no graph
        length = given["input_ids"].shape[1]
        return self.model(**given, cu_seq_lens_q=ends, cu_seq_lens_k=others, max_length_q=length, max_length_k=length)


def batch_of(layout: str, batch: int) -> layouts.Batch:
    return layouts.LAYOUTS[layout](layouts.tokens(hf.VOCABULARY, batch, LENGTH))


def documents() -> dict[str, Any]:
    """One row of documents, and where they begin and end."""
    given = batch_of("packed_by_positions", 1)
    starts = (given["position_ids"][0] == 0).nonzero().flatten()
    return {**given, "ends": torch.cat([starts, torch.tensor([LENGTH])]).int()}


def streams(model: nn.Module, given: dict[str, Any], seen: set[str], **more: Any) -> Report:
    return compare(model, given, chunk_size=7, also=(16,), attention=seen, streams=True, **more)


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma3_short"])
def test_several_sequences(name: str) -> None:
    seen = hf.verdicts(name)
    streams(hf.made(name, "flash_attention_2"), batch_of("plain", 2), seen)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_it_is_what_eager_attention_is(name: str) -> None:
    """The stand-in is held to the contract that transformers counts on."""
    for given in (batch_of("plain", 2), batch_of("packed_by_positions", 1)):
        found, wanted = (hf.made(name, attention)(**given).logits for attention in ("flash_attention_2", "eager"))
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_documents(name: str) -> None:
    seen = hf.verdicts(name)
    streams(Packed(hf.made(name, "flash_attention_2")), documents(), seen)


def test_documents_by_two_tensors() -> None:
    """As a trainer brings them to a GPU, one after the other: nothing says that they are equal."""
    given = documents()
    streams(Packed(hf.made("llama", "flash_attention_2")), {**given, "others": given["ends"].clone()}, {"masked"})


def test_a_mask_of_ones() -> None:
    """transformers looks at it before the layers, which breaks the graph there: all layers are in one."""
    report = streams(hf.made("llama", "flash_attention_2"), batch_of("no_mask_given", 2), {"causal"}, graphs=None)
    assert sum(len(facts.causality.verdicts) > 0 for facts in report.facts if facts.found_causality is not None) == 1


@pytest.mark.parametrize("layout", ["left_padding", "right_padding"])
def test_padding(layout: str) -> None:
    """Each layer counts the rows that are no padding, which breaks the graph there: exact, in pieces."""
    compare(hf.made("llama", "flash_attention_2"), batch_of(layout, 3), streams=None, graphs=None)
