"""Tiny configurations of Hugging Face's decoders. Import after `widen_models()`."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.support.tables import named_cases

VOCABULARY, WIDTH, HEADS, KEY_HEADS, HEAD, WINDOW = 23, 16, 4, 2, 4, 5
ROTARY = named_cases("configuration", globals())


def of(kind: str, *without: str, **more: Any) -> nn.Module:
    """A model of `transformers` with these settings over `ROTARY`'s, of which it does not know some."""
    transformers: Any = importlib.import_module("transformers")
    own = {name: value for name, value in ROTARY.items() if name not in without}
    config = getattr(transformers, {"Gemma3": "Gemma3TextConfig"}.get(kind, f"{kind}Config"))
    model = getattr(transformers, {"GPT2": "GPT2LMHeadModel"}.get(kind, f"{kind}ForCausalLM"))
    return model(config(**{**own, **more}))


def llama(**more: Any) -> nn.Module:
    return of("Llama", **more)


def qwen3(**more: Any) -> nn.Module:
    return of("Qwen3", **{"tie_word_embeddings": False, **more})


def qwen3_tied(**more: Any) -> nn.Module:
    return qwen3(tie_word_embeddings=True, **more)


def mistral(**more: Any) -> nn.Module:
    return of("Mistral", sliding_window=WINDOW, **more)


def gemma2(**more: Any) -> nn.Module:
    return of("Gemma2", sliding_window=WINDOW, query_pre_attn_scalar=HEAD, **more)


def gemma3(**more: Any) -> nn.Module:
    own = {"num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}
    return of("Gemma3", sliding_window=WINDOW, query_pre_attn_scalar=HEAD, **{**own, **more})


def gpt2(**more: Any) -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "n_positions": 64}
    own = {**sizes, **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)}
    ids = {"use_cache": False, "bos_token_id": 1, "eos_token_id": 2}
    model = of("GPT2", *ROTARY, **{**own, **ids, **more})
    model.loss_type = "ForCausalLM"  # type: ignore[assignment]  # else a warning in the loss breaks the graph
    return model


def gpt_neox(**more: Any) -> nn.Module:
    return of("GPTNeoX", "num_key_value_heads", "head_dim", rotary_pct=0.5, **more)


ALL = (llama, qwen3, qwen3_tied, mistral, gemma2, gemma3, gpt2, gpt_neox)
MODELS: dict[str, Callable[..., nn.Module]] = {make.__name__: make for make in ALL}
IMPLEMENTATIONS = [
    (name, attention)
    for name in MODELS
    for attention in ("sdpa", "eager")
    if (name, attention) != ("gemma2", "sdpa")  # transformers refuses it: SDPA knows no softcap
]
_LOCAL = {"mistral": {f"window({WINDOW})"}}
_LOCAL |= {name: {f"window({WINDOW})", "causal"} for name in ("gemma2", "gemma3")}


def verdicts(name: str, attention: str = "sdpa", layout: str = "plain") -> set[str]:
    """Return the verdicts on a model's attention.

    Masks from outside and positions from outside cannot be proven causal. With a padding mask, eager attention adds a huge
    negative number, so a row of padding alone sees all keys, later ones too: that is not causal either.
    """
    given = layout.startswith("packed") or (attention == "eager" and layout.endswith(("padding", "mask_given")))
    return {"masked"} if given else _LOCAL.get(name, {"causal"})


def made(name: str, attention: str = "sdpa", seed: int = 0, **more: Any) -> nn.Module:
    """A model in float64; its norms are drawn too, so that no weight is one or zero."""
    torch.manual_seed(seed)
    model = MODELS[name](attn_implementation=attention, **more).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.mul_(8)  # the usual 0.02 leaves attention almost uniform
    return model


def deep(make: Callable[..., nn.Module], layers: int) -> nn.Module:
    """A model in float64 with `layers` layers."""
    torch.manual_seed(0)
    before, ROTARY["num_hidden_layers"] = ROTARY["num_hidden_layers"], layers
    try:
        return make().double()
    finally:
        ROTARY["num_hidden_layers"] = before


class LossOf(nn.Module):
    """A model whose only output is the loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        return self.model(**inputs).loss
