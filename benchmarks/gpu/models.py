"""Gradients of small models of several kinds, and how often a step waits for the device."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu import Finding, Place
from benchmarks.gpu.measures import distance
from benchmarks.ways import WAYS
from benchmarks.workloads import Decoder

NARROW = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
MODELS = ("Llama-3.1-8B", "Qwen3-8B", "Gemma-3-1B", "GPT-OSS-20B")
FEEDS = ("tokens", "all-ones mask", "packed documents")
OPTIONS = {"outputs": "dense"}


def gradients(place: Place) -> Iterator[Finding]:
    """Of bfloat16 models, and of float32 ones under autocast: their distance to float64's, beside eager's."""
    for model in MODELS[:1] if place.small else MODELS:
        for feed in FEEDS[:1] if place.small else FEEDS:
            work = _decoder(place, model, feed)
            for autocast in (False,) if place.small else (False, True):
                given = work.module.float() if autocast else work.module.bfloat16()
                truth = _gradients(copy.deepcopy(given).double(), work, None, autocast=False)
                eager, ours = (_gradients(given, work, how, autocast) for how in (None, _compiled(place)))
                case = f"{model}, {feed}{', autocast' if autocast else ''}"
                yield Finding(
                    case, "gradients: distance to float64, beside eager's", _distance(ours, truth), _distance(eager, truth)
                )


def synchronizations(place: Place) -> Iterator[Finding]:
    """How often a step makes the host wait, after the first: never where masks follow from positions, once for those of data."""
    for feed in FEEDS[:1] if place.small else FEEDS:
        work = _decoder(place, "Qwen3-8B", feed)
        compiled = _compiled(place)(work.module)

        def step(call: Callable[..., Any] = compiled, inputs: Mapping[str, Tensor] = work.inputs) -> None:
            call(**inputs).loss.backward()

        step()
        step()
        yield Finding(feed, "waits of the host in a step", _waits(place, step))


def _decoder(place: Place, model: str, feed: str) -> Decoder:
    sizes = {"model": model, "num_hidden_layers": 2, "vocab_size": 512, **(TINY if place.small else NARROW)}
    if model.startswith("GPT-OSS"):
        sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    return Decoder(WAYS["eager"], 48 if place.small else 2048, sizes, feed, "bfloat16", place.device)


def _compiled(place: Place) -> Callable[[nn.Module], Callable[..., Any]]:
    size = {"chunk_size": 16, "loss_chunk_size": 16} if place.small else {"chunk_size": 512, "loss_chunk_size": 512}
    return lambda module: torch.compile(module, backend="streambp", options={**OPTIONS, **size})


def _gradients(module: nn.Module, work: Decoder, how: Any, autocast: bool) -> Mapping[str, Tensor]:
    torch._dynamo.reset()
    module.zero_grad(set_to_none=True)
    call = module if how is None else how(module)
    with torch.autocast(work.device.split(":")[0], torch.bfloat16, enabled=autocast):
        loss = call(**work.inputs).loss
    loss.backward()
    return {name: item.grad.double() for name, item in module.named_parameters() if item.grad is not None}


def _distance(found: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> float:
    """The greatest of all parameters', relative to its gradient; those of which rounding is all are left out."""
    most = max(float(item.norm()) for item in truth.values())
    kept = {name: item for name, item in truth.items() if float(item.norm()) > 1e-3 * most}
    return max(distance(found[name], item) for name, item in kept.items())


def _waits(place: Place, work: Callable[[], object]) -> int:
    if not place.device.startswith("cuda"):
        work()
        return 0
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(item.message) for item in seen)
