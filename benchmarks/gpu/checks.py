"""The checks of both commands, the most valuable first, with the seconds each takes. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Check:
    """A generator of findings in this package, `function` ("module:name"), called with a `Place` and `arguments`.

    `seconds` is the time expected on an H100, `small` the time of the small form on two CPU cores with an empty cache.
    """

    name: str
    function: str
    seconds: float
    small: float
    arguments: tuple[Any, ...] = ()

    def expected(self, small: bool) -> float:
        return self.small if small else self.seconds


@dataclass(frozen=True)
class Command:
    """What `python -m benchmarks.gpu NAME` runs, within a default budget of `seconds`."""

    about: str
    seconds: float
    checks: tuple[Check, ...]


LONG, LONGER = 32768, 65536


def _gradients(model: str, feed: str) -> Check:
    if feed == "dropout":
        return Check(f"dropout: {model}", "dropout:dropout", 16, 6, (model,))
    seconds, small = (40 if feed == "plain" else 14), (40 if (model, feed) == COMPILED else 8)
    return Check(f"gradients: {model}, {feed}", "models:gradients", seconds, small, (model, feed))


COMPILED = ("Llama", "plain")  # by Inductor in the small form, too: other models have up to three times its kernels
PLAIN = tuple((model, "plain") for model in ("Llama", "GPT-OSS", "Bamba"))
FED = (  # the first of these show all feeds, and all models with another feed than plain
    *(("Llama", "packed"), ("GPT-OSS", "padded"), ("Bamba", "dropout")),
    *(("Bamba", "packed"), ("Llama", "padded"), ("GPT-OSS", "dropout")),
    *(("GPT-OSS", "packed"), ("Bamba", "padded"), ("Llama", "dropout")),
)


def _step(way: str, length: int, seconds: float) -> Check:
    return Check(f"{way}, {length // 1024}K", "steps:step", seconds, 5, (way, length))


COMMANDS = {
    "kernels": Command(
        "products, attention and small models against float64",
        240,
        (
            Check("versions", "versions:versions", 20, 6),
            Check("attention rates, 8K keys", "attention_rates:rates", 5, 2, (8192,)),
            Check("attention rates, 32K keys", "attention_rates:rates", 4, 2, (32768,)),
            Check("products", "products:accumulation", 2, 2),
            Check("attention against float64", "kernels:against_float64", 14, 4),
            *(_gradients(*case) for case in PLAIN),
            Check("attention rates, 128K keys", "attention_rates:rates", 15, 2, (131072,)),
            Check("experts", "experts:added_by_group", 15, 2),
            Check("attention of documents", "kernels:one_call_against_pieces", 2, 2),
            *(_gradients(*case) for case in FED),
        ),
    ),
    "steps": Command(
        "training steps of Qwen3-8B beside gradient checkpointing",
        420,
        (
            _step("streambp", 8192, 65),
            _step("checkpointing", 8192, 14),
            _step("streambp", LONG, 75),
            _step("checkpointing", LONG, 38),
            _step("streambp, memory_budget=auto", LONG, 75),
            _step("checkpointing, loss in chunks", LONG, 35),
            _step("streambp, memory_budget=auto", 8192, 50),
            _step("streambp", LONGER, 95),
            Check("longest: streambp", "longest:longest", 60, 12, ("streambp",)),
            Check("longest: checkpointing, loss in chunks", "longest:longest", 40, 8, ("checkpointing, loss in chunks",)),
            _step("streambp, offload=inputs", LONG, 75),
            _step("streambp, offload=attention", LONG, 75),
            _step("checkpointing, loss in chunks", 8192, 14),
            _step("checkpointing, model compiled whole", 8192, 110),
        ),
    ),
}
