"""Variants of x-transformers, two layers each."""

from __future__ import annotations

from typing import Any

import torch
from loguru import logger
from torch import nn
from x_transformers import AutoregressiveWrapper, Decoder, Encoder, TransformerWrapper, XTransformer

from tests.packages.checking import HEAD, HEADS, LENGTH, ROWS, VOCABULARY, WIDTH, Builder, Step, tokens, tokens_and_labels

logger.disable("x_transformers")  # it warns of narrow heads
SIZES = {"dim": WIDTH, "heads": HEADS, "attn_dim_head": HEAD}


def wrapped(layers: nn.Module, **wrapper: Any) -> nn.Module:
    return TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=64, attn_layers=layers, **wrapper)


def decoder(depth: int = 2, wrapper: dict[str, Any] | None = None, **layers: Any) -> Builder:
    """A language model with the package's own loss."""
    return lambda: (
        AutoregressiveWrapper(wrapped(Decoder(depth=depth, **SIZES, **layers), **(wrapper or {}))),
        {"x": tokens()},
    )


def encoder(padded: bool = False, **layers: Any) -> Builder:
    """A masked language model: rows see all keys."""
    mask = {"mask": torch.arange(LENGTH) < torch.tensor([LENGTH, LENGTH - 6])[:, None]} if padded else {}
    return lambda: (Step(wrapped(Encoder(depth=2, **SIZES, **layers))), tokens_and_labels() | mask)


def encoder_and_decoder(**more: Any) -> Builder:
    def build() -> tuple[nn.Module, dict[str, Any]]:
        sides = {
            f"{side}_{name}": value
            for side in ("enc", "dec")
            for name, value in {
                "num_tokens": VOCABULARY,
                "heads": HEADS,
                "max_seq_len": 64,
                "attn_dim_head": HEAD,
                "depth": 2,
            }.items()
        }
        return XTransformer(dim=WIDTH, **sides, **more), {"src": tokens(17), "tgt": tokens()}

    return build


CAUSAL, WINDOW, MASKED = {"causal"}, {"window(7)"}, {"masked"}

# what is run each time, and the attention that has to be found
SPREAD: dict[str, tuple[Builder, set[str] | None]] = {
    "forgetting": (decoder(attn_data_dependent_alibi=True), CAUSAL),
    "slopes": (decoder(alibi_pos_bias=True, alibi_num_heads=2, attn_flash=True), CAUSAL),
    "values of the first layer": (decoder(add_value_residual=True), CAUSAL),
}

# what runs with --long
MORE: dict[str, tuple[Builder, set[str] | None]] = {
    "gated residual": (decoder(gate_residual=True), CAUSAL),
    "memory tokens": (decoder(wrapper={"num_memory_tokens": 4}), CAUSAL),
    "talking heads": (decoder(attn_pre_talking_heads=True, attn_post_talking_heads=True), CAUSAL),
    "plain": (decoder(), CAUSAL),
    "hyper-connections": (decoder(num_residual_streams=2), CAUSAL),
    "rotary, swiglu": (decoder(rotary_pos_emb=True, use_rmsnorm=True, ff_glu=True, ff_swish=True, ff_no_bias=True), CAUSAL),
    "rotary, fused": (decoder(rotary_pos_emb=True, attn_flash=True, wrapper={"use_abs_pos_emb": False}), CAUSAL),
    "rotary, scaled by distance": (decoder(rotary_pos_emb=True, rotary_xpos=True), CAUSAL),
    "slopes, spelled out": (decoder(alibi_pos_bias=True), CAUSAL),
    "buckets of distance": (decoder(rel_pos_bias=True), CAUSAL),
    "bias by a network": (decoder(dynamic_pos_bias=True), CAUSAL),
    "contextual positions": (decoder(attn_use_cope=True), MASKED),
    "grouped queries": (decoder(attn_kv_heads=2, rotary_pos_emb=True), CAUSAL),
    "one key head": (decoder(attn_one_kv_head=True), CAUSAL),
    "one key head, fused": (decoder(attn_one_kv_head=True, attn_flash=True), CAUSAL),
    "low rank": (
        decoder(attn_use_latent_q=True, attn_dim_latent_q=16, attn_use_latent_kv=True, attn_dim_latent_kv=16),
        CAUSAL,
    ),
    "norms of queries and keys": (decoder(attn_qk_norm=True, rotary_pos_emb=True), CAUSAL),
    "macaron, sandwich norms": (decoder(macaron=True, sandwich_norm=True), CAUSAL),
    "sandwich of layers": (decoder(depth=4, sandwich_coef=1), CAUSAL),
    "few attentions": (decoder(depth=4, par_ratio=2), CAUSAL),
    "shifted tokens": (decoder(shift_tokens=1), CAUSAL),
    "tokens shifted thrice": (decoder(shift_tokens=3), CAUSAL),
    "sparse": (decoder(attn_sparse_topk=5), MASKED),
    "hard": (decoder(attn_hard=True), MASKED),
    "sigmoid": (decoder(attn_sigmoid=True), CAUSAL),
    "distances": (decoder(attn_l2_distance=True), CAUSAL),
    "window": (decoder(attn_max_attend_past=6), WINDOW),
    "forgetting by rows": (decoder(attn_data_dependent_alibi=True, attn_data_dependent_alibi_per_row=True), MASKED),
    "memory keys": (decoder(attn_num_mem_kv=3), CAUSAL),
    "sink": (decoder(attn_head_learned_sink=True), CAUSAL),
    "scores of the layer before": (decoder(residual_attn=True), CAUSAL),
    "softcap": (decoder(attn_softclamp_logits=True, rotary_pos_emb=True), CAUSAL),
    "logarithms of values": (decoder(attn_laser=True), CAUSAL),
    "gated values": (decoder(attn_gate_values=True, attn_gate_value_heads=True), CAUSAL),
    "squared relu, norm after it": (decoder(ff_relu_squared=True, ff_post_act_ln=True), CAUSAL),
    "no norm": (decoder(use_dynamic_tanh=True), CAUSAL),
    "norms behind, scaled": (decoder(use_scalenorm=True, pre_norm=False), CAUSAL),
    "scaled branches": (decoder(use_layerscale=True, layerscale_init_value=0.1), CAUSAL),
    "one layer twice": (decoder(weight_tie_layers=True), CAUSAL),
    "skips": (decoder(depth=4, unet_skips=True), CAUSAL),
    "mixed layers": (decoder(integrate_layers=True), CAUSAL),
    "mixture of softmaxes": (decoder(wrapper={"mixture_of_softmax": True}), CAUSAL),
    "waves as positions, tied": (decoder(wrapper={"scaled_sinu_pos_emb": True, "tie_embedding": True}), CAUSAL),
    "encoder": (encoder(rotary_pos_emb=True), MASKED),
    "encoder, padded": (encoder(padded=True, alibi_pos_bias=True), MASKED),
}
PAIRS: dict[str, Builder] = {
    "plain": encoder_and_decoder(),
    "fused": encoder_and_decoder(enc_attn_flash=True, dec_attn_flash=True, enc_rotary_pos_emb=True, dec_rotary_pos_emb=True),
}
assert ROWS == 2  # lengths of the padded encoder
