"""Families of litgpt, each by its switches."""

from __future__ import annotations

from typing import Any

from litgpt import GPT, Config

from tests.packages.checking import HEAD, HEADS, VOCABULARY, WIDTH, Builder, Step, tokens_and_labels

SIZES = {"block_size": 64, "vocab_size": VOCABULARY, "padded_vocab_size": VOCABULARY, "n_layer": 2}
WIDTHS = {"n_head": HEADS, "n_embd": WIDTH, "head_size": HEAD}
PLAIN = {"rotary_percentage": 1.0, "parallel_residual": False, "bias": False, "norm_class_name": "RMSNorm"}
LLAMA = {**PLAIN, "mlp_class_name": "LLaMAMLP", "intermediate_size": 48, "n_query_groups": 2}
BEHIND = {"post_attention_norm": True, "post_mlp_norm": True}
GEMMA = {**LLAMA, **BEHIND, "mlp_class_name": "GemmaMLP", "scale_embeddings": True, "sliding_window_size": 6}
CAPPED = {"sliding_window_indices": [0, 1], "attention_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}


def gpt(**switches: Any) -> Builder:
    return lambda: (Step(GPT(Config(**{**SIZES, **WIDTHS, **switches}))), tokens_and_labels())


CAUSAL, WINDOWS = {"causal"}, {"causal", "window(6)"}  # litgpt writes the mask of a window row by row, in a loop
DECODERS: dict[str, tuple[Builder, set[str]]] = {
    "gemma 2": (gpt(**GEMMA, **CAPPED), WINDOWS),
    "phi": (gpt(rotary_percentage=0.5, shared_attention_norm=True, lm_head_bias=True, gelu_approximate="tanh"), CAUSAL),
    "falcon": (gpt(rotary_percentage=1.0, bias=False, n_query_groups=1, shared_attention_norm=True), CAUSAL),
    "olmo 2": (gpt(**LLAMA, **BEHIND, norm_1=False, norm_2=False, norm_qk=True, norm_qk_type="olmo2"), CAUSAL),
}
EXPERTS = gpt(**{**LLAMA, "mlp_class_name": "LLaMAMoE"}, n_expert=4, n_expert_per_token=2)
