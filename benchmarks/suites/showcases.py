"""Narrow decoders with what makes a real one hard: a vocabulary of 262,208, a gated delta rule."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import torch
from torch import nn

import streamfx
from benchmarks.settings import MIB, Rows, Settings
from streamfx.tools.planner.model_names import config_file
from streamfx.tools.planner.models import configuration, language_model

NARROW = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
GATED = {
    f"linear_{name}": size
    for name, size in {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 64, "value_head_dim": 64}.items()
}
CASES: dict[str, tuple[str, dict[str, Any], int]] = {  # the shipped configuration, what replaces its sizes, and tokens
    "six narrow layers, the vocabulary of Gemma 3": ("Gemma-3-12B", {**NARROW, "num_hidden_layers": 6}, 2048),
    "four narrow layers of Qwen3.6": ("Qwen3.6-27B", {**NARROW, **GATED, "num_hidden_layers": 4, "vocab_size": 16_000}, 1024),
}


def showcases(settings: Settings) -> Rows:
    """Three steps of each case, in float32 with eager bodies, by `streamfx.compare`; ratios are to gradient checkpointing's."""
    rows: Rows = []
    for label, (name, sizes, length) in CASES.items():
        tokens = 256 if settings.quick else length
        ids = torch.randint(0, 16_000, (1, tokens), generator=torch.Generator().manual_seed(0))
        found = streamfx.compare(
            partial(_built, name, sizes), steps=3, options={"bodies": "eager"}, input_ids=ids, labels=ids
        ).summary()
        other = next(way for way in found["ways"] if way["name"] == "gradient checkpointing")
        for way in found["ways"]:
            row = {
                "step": label,
                "T": tokens,
                "way": way["name"],
                "loss": f"{way['loss']:.6f}",
                "peak MiB": way["peak_bytes"] / MIB,
            }
            of = {"of checkpointing": way["peak_bytes"] / other["peak_bytes"], "s": way["step_seconds"]}
            rows.append({**row, **of, "of its": way["step_seconds"] / other["step_seconds"]})
    return rows


def _built(name: str, sizes: dict[str, Any]) -> nn.Module:
    """Return a decoder of a shipped configuration in other sizes; each process calls this."""
    torch.manual_seed(0)
    values = json.loads(config_file(name).read_text())
    return language_model(configuration({**values, **sizes}), torch.float32, "cpu").train()
