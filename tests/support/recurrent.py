"""Tiny models of transformers that carry a state."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

VOCABULARY, BATCH, WIDTH = 23, 2, 8
HEADS_OF = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "intermediate_size": 12}
GATED = {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 4}
SIZES: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": 4, "time_step_rank": 2, "expand": 1},
    "mamba2": {"num_heads": 2, "head_dim": 8, "expand": 2, "state_size": 4, "n_groups": 1, "chunk_size": 11},
    "xlstm": {"num_heads": 2, "mode": "train", "chunk_size": 11},
    "rwkv": {"attention_hidden_size": 8, "intermediate_size": 12, "context_length": 128},
    "qwen3_next": {**HEADS_OF, **GATED, "mlp_only_layers": [0, 1], "layer_types": ["linear_attention"]},
    "recurrent_gemma": {**HEADS_OF, "lru_width": 8, "attention_window_size": 16},
}
LENGTHS = {"qwen3_next": 130, "mamba2": 22, "xlstm": 22}  # blocks have 64 rows, or two are to be filled


def of_transformers(name: str, layers: int) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": layers, "use_cache": False, **SIZES[name]}
    config = transformers.AutoConfig.for_model(name, **sizes | ({"num_blocks": layers} if name == "xlstm" else {}))
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    model.loss_type = "ForCausalLM"  # type: ignore[assignment]  # else a warning in the loss may break the graph
    return model
