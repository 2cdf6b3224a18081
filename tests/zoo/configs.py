"""A tiny configuration of any model type, by general rules.

A configuration is made from its own defaults: sizes shrink by name, never grow; of the layers only as many are kept as show
every kind; dropout is off. `OVERRIDES` holds what no rule gives: values that have to fit together in one model's own way.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

VOCABULARY, WIDTH, INNER, HEADS, KEY_HEADS, HEAD, RANK, WINDOW, LAYERS = 97, 32, 48, 4, 2, 8, 16, 8, 2

# the first pattern that matches the whole name of a number says the most that it may be
SIZES: tuple[tuple[str, int], ...] = (
    (r"type_vocab_size", 2),
    (r".*vocab_size(_base|_per_layer_input)?", VOCABULARY),
    (r".*(num_(key_value|kv)_heads|num_query_groups)", KEY_HEADS),
    (r"linear_num_key_heads|index_n_heads|n_groups", 2),
    (r".*(num_attention|attention|num|_n)_heads(_per_layer)?|n_heads?|n_mamba_heads|heads_per_ngram|o_groups", HEADS),
    (r"qk_head_dim", 2 * HEAD),
    (r".*(head_dim|headdim|d_head|head_size)|kv_channels|d_kv|dim_head|d_head|rotary_dim", HEAD),
    (r"d_rel|hidden_size_per_layer_input|time_step_rank|.*dt_rank|.*state_size|.*d_state", 8),
    (r"hc_lowrank|.*_rank|router_hidden_size|index_block_size", RANK),
    (r"ple_embed_dim|.*_mid_dim", WIDTH),
    (r"(moe_)?(shared_)?(expert|moe)s?_(intermediate|ffn_hidden)_size|shared_(experts?_)?intermediate_size", 16),
    (r".*intermediate_size(_mlp)?|.*ffn_(dim|hidden_size)|dim_ff|d_ff|dff|feed_forward_size|mlp_dim", INNER),
    (r"d_inner", INNER),
    (r".*(hidden_size|hidden_size_global|embed_dim|emb_dim|embedding_dim|embedding_size)", WIDTH),
    (r"d_model|n_embd|lru_width|mamba_d_ssm|dim_model_base|.*proj_dim|input_size", WIDTH),
    (r"(moe_)?(num|n)_(local_|routed_)?experts|zero_expert_num", 4),
    (r"num_experts_per_tok(en)?|moe_(topk|k)|n_group|num_expert_group|experts_per_token", 2),
    (r"topk_group", 1),
    (r"num_kv_shared_layers|first_k_dense_replace|num_dense_layers|depth", 1),
    (r".*(num_hidden|num|n|decoder|encoder)_layers?(_per_stack)?|num_blocks", LAYERS),
    (r".*(sliding_window|window|window_size|window_len|attention_chunk_size|local_attention|sliding_window_size)", WINDOW),
    (r"index_topk|(mamba_)?chunk_size|(local|lsh)_attn_chunk_length|block_size|rel_extent|.*floor(_scale)?", WINDOW),
    (r"index_topk_blocks|(mamba_)?expand|.*num_codebooks", 1),
    (r"prompt_(length|types)|segment_types|position_bias_num_buckets|n_layers_per_attn_res_block", 4),
    (r"(max_|n_|original_max_|model_max_)?(positions?(_embeddings)?|seq_len|length)|n_ctx|context_length", 64),
    (r"max_(target|source)_positions", 64),
    (r"split_ngram_parts|make_ngram_vocab_size_divisible_by|centroid_intermediate_top_k|num_centroids", 4),
    (r"ffn_round_up_to_multiple_of|block_multiple_of", 16),
)
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks")
TOKEN = re.compile(r".*(_token_id|_token_index|_index)")
# what stands in for a number that the configuration leaves open, where the model asks for one
OPEN = {
    "head_dim": HEAD,
    "num_key_value_heads": KEY_HEADS,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": HEAD,
    "indexer_budget": WINDOW,
    "indexer_compress_ratio": 2,
    "ple_embed_dim": WIDTH,
}

OVERRIDES: dict[str, dict[str, Any]] = {
    "blt": {"encoder_hash_byte_group_vocab": 120},  # 500,002 rows by default
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
            for kind in ("sliding_attention", "full_attention")
        },
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0, "kv_n_heads": KEY_HEADS}},  # its own default lacks them
    "deepseek_v4": {  # 22 rows have blocks of both kinds, and more of one than a row chooses
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "index_topk": 2,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
    "reformer": {
        "axial_pos_embds_dim": [16, 16],
        "axial_pos_shape": [4, 6],
        "lsh_attn_chunk_length": 4,
        "local_attn_chunk_length": 4,
        "hash_seed": 0,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "num_hidden_layers": 4,
        "attention_hidden_size": 2 * WIDTH,
        "attention_head_dim": 2 * HEAD,
    },
    "zamba2": {"attention_hidden_size": 2 * WIDTH, "attention_head_dim": 2 * HEAD},
}


def tiny(model_type: str) -> Any:
    """The tiny configuration of a model type."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    own = OVERRIDES.get(model_type, {})
    return kind(**merged(shrunk(kind(**own.get("start", {}))), {k: v for k, v in own.items() if k != "start"}))


def merged(found: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Overrides, which may reach into the configurations of parts; None takes a value away."""
    result = dict(found)
    for name, value in more.items():
        if isinstance(value, Mapping) and isinstance(result.get(name), dict):
            result[name] = merged(result[name], value)
        elif value is None:
            result.pop(name, None)
        else:
            result[name] = value
    return result


def shrunk(config: Any) -> dict[str, Any]:
    """Arguments for a smaller configuration like this one."""
    from transformers import PreTrainedConfig

    arguments: dict[str, Any] = {}
    for name, value in vars(config).items():
        if name.startswith("_") or isinstance(getattr(type(config), name, None), property):
            continue
        if isinstance(value, PreTrainedConfig):
            arguments[name] = {"model_type": value.model_type, **shrunk(value)}
        elif name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
            arguments[name] = shrunk_rope(value)
        elif value is None and name in OPEN:
            arguments[name] = OPEN[name]
        elif (small := shrunk_value(name, value, config)) is not None:
            arguments[name] = small
    return {**arguments, **fewer_layers(config)}


def shrunk_value(name: str, value: Any, config: Any) -> Any:
    """The small value for an attribute, None to leave it to the configuration."""
    if name == "use_cache":
        return False
    if name == "is_decoder":
        return True
    if isinstance(value, bool):
        return None
    if isinstance(value, float) and re.search(r"drop|jitter", name):
        return 0.0
    if not isinstance(value, int):
        return None
    if TOKEN.fullmatch(name):
        return value if value < VOCABULARY else VOCABULARY - 1 - value % 7
    if re.fullmatch(SIZES[2][0], name) and value == getattr(config, "num_attention_heads", None):
        return min(value, HEADS)  # as many keys as queries, as before
    most = next((most for pattern, most in SIZES if re.fullmatch(pattern, name)), None)
    return None if most is None else min(value, most)


def shrunk_rope(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters for heads of size `HEAD`; they may be nested by kind of layer."""
    found: dict[str, Any] = {}
    for name, value in parameters.items():
        if isinstance(value, Mapping):
            found[name] = shrunk_rope(value)
        elif name in ("short_factor", "long_factor"):
            found[name] = list(value)[: HEAD // 2]
        elif name == "mrope_section":
            found[name] = [HEAD // 2 - 2, 1, 1]
        elif name == "original_max_position_embeddings":
            found[name] = 16
        else:
            found[name] = value
    return found


def fewer_layers(config: Any) -> dict[str, Any]:
    """As many layers as show every kind: lists with an entry per layer are cut to the layers that add something new."""
    name = next((name for name in LAYER_COUNTS if isinstance(vars(config).get(name), int)), None)
    if name is None:
        return {}
    count = getattr(config, name)
    lists = {key: value for key, value in vars(config).items() if is_per_layer(value, count) and not key.startswith("_")}
    if not lists:
        return {}
    kept = distinct_layers(list(lists.values()), count)
    cut = {key: [shrunk_entry(key, value[i]) for i in kept] for key, value in lists.items()}
    return {name: len(kept), **cut}


def shrunk_entry(name: str, value: Any) -> Any:
    small = shrunk_value(re.sub(r"_per_layer$", "", name), value, None)
    return value if small is None or isinstance(value, bool) else small


def is_per_layer(value: Any, count: int) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and len(value) == count > 2


def distinct_layers(lists: list[Sequence[Any]], count: int) -> list[int]:
    """Positions of layers such that every value of every list occurs, at least two."""
    kept: list[int] = []
    seen: set[tuple[int, str]] = set()
    for i in range(count):
        new = {(number, str(values[i])) for number, values in enumerate(lists)} - seen
        is_counter = len(new) == 1 and len({str(v) for v in lists[next(iter(new))[0]]}) > 5
        if new and not is_counter:
            kept.append(i)
            seen |= new
    others = [i for i in range(count) if i not in kept]
    return sorted(kept + others[: max(0, LAYERS - len(kept))])
