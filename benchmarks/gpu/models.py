"""Gradients of small models with compiled bodies: how far they are from float64's, beside eager's in the same type."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.checks import COMPILED
from benchmarks.gpu.measures import Finding, is_off
from benchmarks.gpu.place import Place

SIZES = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
TINY = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
HYBRID = {"num_hidden_layers": 2, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_state": 16, "mamba_chunk_size": 16}
OWN: dict[str, tuple[str, dict[str, Any]]] = {  # type of configuration, and what is not in SIZES
    "Llama": ("llama", {}),
    "GPT-OSS": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32}),
    "Bamba": ("bamba", HYBRID),
}
LENGTH, CHUNK = (2048, 48), (512, 16)  # on a GPU, and small
DOCUMENTS, PADDED = 8, 4  # documents of a row; one in so many rows of the second sequence is padding
GREATEST = 1e-3  # gradients of less than this share of the largest one's norm are rounding


def gradients(place: Place, model: str, feed: str) -> Iterator[Finding]:
    """Distances of all gradients to float64's, ours and eager's in bfloat16; and of the worst parameter's."""
    module = made(place, model)
    inputs = fed(place, feed, module.config.vocab_size)
    truth = _gradients(in_float64(module), inputs)
    eager = _gradients(module, inputs)
    start = time.perf_counter()
    ours = _gradients(compiled(module, place, in_small=(model, feed) == COMPILED), inputs, module)
    place.wait()
    taken = time.perf_counter() - start
    error, of_eager = (_distance(found, truth) for found in (ours, eager))
    shares = {name: _share(name, ours, eager, truth) for name in _large(truth)}
    worst = max(shares, key=lambda name: shares[name])
    figures = {"distance": error, "eager's": of_eager, "first step s": taken, "worst, of eager's": shares[worst], "in": worst}
    missing = sorted(truth.keys() ^ ours.keys())
    yield Finding(
        "", {**figures, **({"without a gradient": str(missing[:3])} if missing else {})}, bool(missing) or is_off(error, of_eager)
    )


def made(place: Place, model: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    """A model with random weights, made on the device."""
    from transformers import AutoConfig, AutoModelForCausalLM, logging

    logging.set_verbosity_error()
    kind, own = OWN[model]
    config = AutoConfig.for_model(kind, **{**(TINY if place.small else SIZES), **own, "use_cache": False, **changes})
    config.use_cache = False
    torch.manual_seed(0)
    with torch.device(place.device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).train()


def fed(place: Place, feed: str, vocabulary: int) -> dict[str, Tensor]:
    """Two sequences: as they are, as documents that are packed, or with padding at the end of the second."""
    length = LENGTH[place.small]
    ids = place.tokens(vocabulary, 2, length)
    inputs = {"input_ids": ids, "labels": ids}
    if feed == "packed":
        own = torch.arange(-(-length // DOCUMENTS), device=place.device)
        inputs["position_ids"] = own.repeat(DOCUMENTS)[:length].expand(2, -1).contiguous()
    if feed == "padded":
        mask = torch.ones_like(ids)
        mask[1, -(length // PADDED) :] = 0
        inputs |= {"attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    return inputs


def compiled(module: nn.Module, place: Place, in_small: bool = False) -> Callable[..., Any]:
    """The model in chunks, with bodies compiled by Inductor; in the small form only if asked, as each takes a CPU seconds."""
    size, bodies = CHUNK[place.small], "inductor" if in_small or not place.small else "eager"
    options: dict[str, Any] = {"bodies": bodies, "outputs": "dense", "chunk_size": size, "loss_chunk_size": size}
    run: Callable[..., Any] = torch.compile(module, backend="streambp", options=options)
    return run


def in_float64(module: nn.Module) -> nn.Module:
    """A copy in float64. Its experts run one after the other: grouped products are made for half types."""
    twin = copy.deepcopy(module).double()
    set_experts(twin, "eager")
    return twin


def set_experts(module: nn.Module, implementation: str) -> None:
    """Choose how transformers runs experts, where the model has any and the version offers a choice."""
    choose, get = (getattr(module, f"{verb}_experts_implementation", None) for verb in ("set", "get"))
    if choose is not None and (get is None or any(get().values())):
        choose(implementation)


def _gradients(call: Callable[..., Any], inputs: Mapping[str, Tensor], module: nn.Module | None = None) -> dict[str, Tensor]:
    """Gradients by the parameter's name; those of the module are dropped."""
    own = module if module is not None else call
    assert isinstance(own, nn.Module)
    call(**inputs).loss.backward()
    found = {name: item.grad.double() for name, item in own.named_parameters() if item.grad is not None}
    own.zero_grad(set_to_none=True)
    return found


def _distance(found: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> float:
    """The norm of all differences over that of all gradients."""
    apart = sum(float((found[name] - item).square().sum()) for name, item in truth.items() if name in found)
    return float((apart / sum(float(item.square().sum()) for item in truth.values())) ** 0.5)


def _share(name: str, ours: Mapping[str, Tensor], eager: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> float:
    """One parameter's distance over eager's."""
    if name not in ours:
        return float("inf")
    own, other = (float((found[name] - truth[name]).norm()) for found in (ours, eager))
    return own / max(other, 1e-30)


def _large(truth: Mapping[str, Tensor]) -> list[str]:
    """The parameters whose gradients are more than rounding."""
    most = max(float(item.norm()) for item in truth.values())
    return [name for name, item in truth.items() if float(item.norm()) > GREATEST * most]
