"""Without gradients: a loss of any length in the memory of one layer, a cache of a prompt, and calls that continue from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

import streamfx

SHAPE = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
LENGTH, PROMPT = 40, 23


def made(layers: int = 2, window: int | None = None) -> Any:
    torch.manual_seed(0)
    if window is not None:
        return MistralForCausalLM(MistralConfig(num_hidden_layers=layers, sliding_window=window, **SHAPE)).double().eval()
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **SHAPE)).double().eval()


def tokens(length: int = LENGTH) -> torch.Tensor:
    return torch.randint(0, 61, (2, length), generator=torch.Generator().manual_seed(1))


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found.logits + 0, expected.logits, rtol=1e-10, atol=1e-12)
    for layer, other in zip(found.past_key_values.layers, expected.past_key_values.layers, strict=True):
        torch.testing.assert_close(layer.keys, other.keys, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(layer.values, other.values, rtol=1e-10, atol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize(("mode", "window"), [(torch.no_grad, None), (torch.inference_mode, 9)])
def test_a_prompt_and_what_follows_it(mode: Any, window: int | None) -> None:
    """A token, and all that is left; the second prompt is shorter than that, and its length a symbol."""
    model, ids = made(window=window), tokens()
    options: dict[str, Any] = {"chunk_size": 7, "loss_chunk_size": 7, "bodies": "eager"}
    compiled = torch.compile(model, backend="streambp", options=options)
    with mode():
        for prompt in (PROMPT, 6) if window is None else (PROMPT,):
            own, theirs = compiled(ids[:, :prompt], use_cache=True), model(ids[:, :prompt], use_cache=True)
            same(own, theirs)
            for first, last in ((prompt, prompt + 1), (prompt + 1, LENGTH)):
                own = compiled(ids[:, first:last], past_key_values=own.past_key_values, use_cache=True)
                theirs = model(ids[:, first:last], past_key_values=theirs.past_key_values, use_cache=True)
                same(own, theirs)


def test_what_follows_a_prompt_streams() -> None:
    model, ids = made(), tokens()
    with torch.no_grad():
        past = model(ids[:, :PROMPT], use_cache=True).past_key_values
        found = streamfx.explain(model, ids[:, PROMPT:], past_key_values=past, use_cache=True, chunk_size=5, bodies="eager")
    assert [(stage.kind, stage.attention) for stage in found.stages] == [("streamed", ("causal",))] * 2


def test_a_loss_takes_the_memory_of_one_layer() -> None:
    ids = tokens(256)

    def peak(layers: int) -> int:
        with torch.no_grad():
            found = streamfx.explain(
                made(layers), ids, labels=ids, use_cache=False, chunk_size=16, loss_chunk_size=16, bodies="eager"
            )
        assert all(stage.kind == "streamed" for stage in found.stages)
        return int(found.summary(with_baseline=False)["peak_bytes"])

    assert peak(5) == peak(2)
