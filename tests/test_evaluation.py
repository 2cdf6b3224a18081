"""Without gradients: a loss of any length in the memory of one layer, a cache of a prompt, and calls that continue from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import streamfx

pytestmark = pytest.mark.compiled

SHAPE = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
LENGTH, PROMPT = 40, 23
CHUNKS: dict[str, Any] = {"chunk_size": 7, "loss_chunk_size": 7, "bodies": "eager"}


def made(layers: int = 2) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **SHAPE)).double().eval()


def tokens(length: int = LENGTH) -> torch.Tensor:
    return torch.randint(0, 61, (2, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.long
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_prompt_and_what_follows_it(mode: Any) -> None:
    """A token, and all that is left; the second prompt is shorter than that, and its length a symbol."""
    model, ids = made(), tokens()
    both = torch.compile(model, backend="streambp", options=CHUNKS), model
    with mode():
        for prompt in (PROMPT, 6):
            pasts: list[Any] = [None, None]
            for first, last in ((0, prompt), (prompt, prompt + 1), (prompt + 1, LENGTH)):
                results = [
                    run(ids[:, first:last], past_key_values=past, use_cache=True) for run, past in zip(both, pasts, strict=True)
                ]
                pasts = [result.past_key_values for result in results]
                caches = [[(layer.keys, layer.values) for layer in past.layers] for past in pasts]
                torch.testing.assert_close(results[0].logits + 0, results[1].logits, rtol=1e-10, atol=1e-12)
                torch.testing.assert_close(*caches, rtol=1e-10, atol=1e-12)


def test_what_follows_a_prompt_streams() -> None:
    model, ids = made(), tokens()
    with torch.no_grad():
        past = model(ids[:, :PROMPT], use_cache=True).past_key_values
        found = streamfx.explain(model, ids[:, PROMPT:], past_key_values=past, use_cache=True, chunk_size=5, bodies="eager")
    assert [(stage.kind, stage.attention) for stage in found.stages] == [("streamed", ("causal",))] * 2


def test_a_loss_takes_the_memory_of_one_layer() -> None:
    ids, peaks = tokens(128), []
    for layers in (2, 5):
        with torch.no_grad():
            found = streamfx.explain(made(layers), ids, labels=ids, use_cache=False, **CHUNKS)
        assert all(stage.kind == "streamed" for stage in found.stages)
        peaks.append(found.summary(with_baseline=False)["peak_bytes"])
    assert peaks[0] == peaks[1]
