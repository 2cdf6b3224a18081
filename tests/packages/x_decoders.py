"""Variants of x-transformers, two layers each."""

from typing import Any

import torch
from loguru import logger
from torch import nn
from x_transformers import AutoregressiveWrapper, Decoder, Encoder, TransformerWrapper, XTransformer

from tests.packages.checking import HEAD, HEADS, LENGTH, VOCABULARY, WIDTH, Builder, Step, tokens, tokens_and_labels

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


DECODERS: dict[str, Builder] = {
    "forgetting": decoder(attn_data_dependent_alibi=True),
    "slopes": decoder(alibi_pos_bias=True, alibi_num_heads=2, attn_flash=True),
    "values of the first layer": decoder(add_value_residual=True),
    "memory tokens": decoder(wrapper={"num_memory_tokens": 4}),
    "talking heads": decoder(attn_pre_talking_heads=True, attn_post_talking_heads=True),
    "hyper-connections": decoder(num_residual_streams=2),
    "rotary, scaled by distance": decoder(rotary_pos_emb=True, rotary_xpos=True),
    "buckets of distance": decoder(rel_pos_bias=True),
    "bias by a network": decoder(dynamic_pos_bias=True),
    "contextual positions": decoder(attn_use_cope=True),
    "one key head, fused": decoder(attn_one_kv_head=True, attn_flash=True),
    "low rank": decoder(attn_use_latent_q=True, attn_dim_latent_q=16, attn_use_latent_kv=True, attn_dim_latent_kv=16),
    "shifted tokens": decoder(shift_tokens=3),
    "sparse": decoder(attn_sparse_topk=5),
    "sigmoid": decoder(attn_sigmoid=True),
    "distances": decoder(attn_l2_distance=True),
    "window": decoder(attn_max_attend_past=6),
    "memory keys": decoder(attn_num_mem_kv=3),
    "sink": decoder(attn_head_learned_sink=True),
    "scores of the layer before": decoder(residual_attn=True),
    "skips": decoder(depth=4, unet_skips=True),
    "mixture of softmaxes": decoder(wrapper={"mixture_of_softmax": True}),
    "encoder, padded": encoder(alibi_pos_bias=True),
}
ATTENTION = {"window": "window(7)", **dict.fromkeys(("contextual positions", "sparse", "encoder, padded"), "masked")}
