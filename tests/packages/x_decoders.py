"""Variants of x-transformers, two layers each."""

from typing import Any

import torch
from loguru import logger
from torch import nn
from x_transformers import AutoregressiveWrapper, Decoder, Encoder, TransformerWrapper, XTransformer

from tests.packages.checking import HEAD, HEADS, LENGTH, VOCABULARY, WIDTH, Builder, Step, tokens, tokens_and_labels
from tests.support.tables import named_cases

logger.disable("x_transformers")  # it warns of narrow heads
SIZES = {"dim": WIDTH, "heads": HEADS, "attn_dim_head": HEAD}


def wrapped(layers: nn.Module, **wrapper: Any) -> nn.Module:
    return TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=64, attn_layers=layers, **wrapper)


def decoder(depth: int = 2, wrapper: dict[str, Any] | None = None, **layers: Any) -> Builder:
    """A language model with the package's own loss."""
    return lambda: (AutoregressiveWrapper(wrapped(Decoder(depth=depth, **SIZES, **layers), **(wrapper or {}))), {"x": tokens()})


def encoder(**layers: Any) -> Builder:
    """A masked language model: rows see all keys but those of padding."""
    mask = {"mask": torch.arange(LENGTH) < torch.tensor([LENGTH, LENGTH - 6])[:, None]}
    return lambda: (Step(wrapped(Encoder(depth=2, **SIZES, **layers))), tokens_and_labels() | mask)


def encoder_and_decoder() -> tuple[nn.Module, dict[str, Any]]:
    sizes = {"num_tokens": VOCABULARY, "heads": HEADS, "max_seq_len": 64, "attn_dim_head": HEAD, "depth": 2}
    sizes |= {"attn_flash": True, "rotary_pos_emb": True}
    sides = {f"{side}_{name}": value for side in ("enc", "dec") for name, value in sizes.items()}
    return XTransformer(dim=WIDTH, **sides), {"src": tokens(17), "tgt": tokens()}


DECODERS: dict[str, Builder] = named_cases("decoders", globals())
ATTENTION = {"window": "window(7)", **dict.fromkeys(("contextual positions", "sparse", "encoder, padded"), "masked")}
