"""Models whose layers carry a state along the sequence: FLOPs and memory beside gradient checkpointing's."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.settings import MIB, Rows, Settings

COMMON = {"vocab_size": 2_000, "hidden_size": 128, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 384}
# the lengths are small where transformers writes the recurrence as a Python loop over rows
FAMILIES: dict[str, tuple[dict[str, Any], tuple[int, ...], int]] = {
    "mamba2": (
        {"num_heads": 4, "head_dim": 64, "expand": 2, "state_size": 16, "n_groups": 1, "chunk_size": 64},
        (512, 1024),
        128,
    ),
    "mamba": ({"state_size": 8}, (32, 64), 16),
    "rwkv": ({"attention_hidden_size": 128, "intermediate_size": 384}, (32, 64), 16),
    "recurrent_gemma": ({**HEADS, "lru_width": 128, "attention_window_size": 32}, (32, 64), 16),
    "xlstm": ({"num_blocks": 4, "num_heads": 4, "chunk_size": 64, "mode": "train"}, (256, 512), 64),
    "qwen3_next": (
        {
            **HEADS,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "mlp_only_layers": [*range(4)],
        },
        (512, 1024),
        128,
    ),
}


def recurrences(settings: Settings) -> Rows:
    """Four layers of width 128 as transformers writes them, as `streamfx.explain` follows them, in chunks of so many rows.
    Both halves, activations and gradients, beside checkpointing of every layer.
    """
    rows: Rows = []
    for family, (sizes, lengths, chunk) in list(FAMILIES.items())[: 1 if settings.quick else None]:
        for length in settings.lengths or lengths[: 1 if settings.quick else None]:
            settings.tell(f"{family}, T = {length}")
            rows.append({"model": family, "T": length, "chunk": chunk, **_figures(family, sizes, length, chunk)})
    return rows


def _figures(family: str, sizes: dict[str, Any], length: int, chunk: int) -> dict[str, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM

    import streamfx

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **COMMON, **sizes)).train()
    model.config.use_cache = False
    ids = torch.arange(length)[None] % COMMON["vocab_size"]
    found = streamfx.explain(model, input_ids=ids, labels=ids, chunk_size=chunk, loss_chunk_size=chunk).summary()
    if not found["checkpointing_flops"]:
        return {"peak MiB": found["peak_bytes"] / MIB, "why not": found["not_checkpointed"]}
    return {
        "FLOPs of checkpointing's": found["flops"] / found["checkpointing_flops"],
        "peak MiB": found["peak_bytes"] / MIB,
        "of checkpointing's": found["peak_bytes"] / found["checkpointing_peak_bytes"],
    }
