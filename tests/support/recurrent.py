"""A tiny xLSTM of transformers."""

from __future__ import annotations

import pytest
from torch import nn

VOCABULARY, BATCH = 23, 2


def xlstm(layers: int) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 8, "num_hidden_layers": layers, "num_blocks": layers, "use_cache": False}
    config = transformers.AutoConfig.for_model("xlstm", **sizes, num_heads=2, mode="train", chunk_size=11)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    model.loss_type = "ForCausalLM"  # type: ignore[assignment]  # else a warning in the loss may break the graph
    return model
