"""Build the models to plan for on the meta device, which has shapes but no memory."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamfx.argument_checks import did_you_mean
from streamfx.errors import PlanError, describe_error, with_article
from streamfx.tools.planner.model_names import config_file
from streamfx.tools.planner.quantized import quantized
from streamfx.torch_private import FakeTensor

KINDS = "a Hugging Face configuration (an object, a mapping, a folder, a JSON file, a known name), or an nn.Module"
LAYERS, MAX_LAYERS = "num_hidden_layers", 2000
SIZES = (LAYERS, "hidden_size", "vocab_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def configuration(source: Any) -> Any:
    """Return a Hugging Face configuration from an object, a mapping, or a source that `config_file` finds."""
    if isinstance(source, Mapping):
        return _configuration_of(dict(source), "a mapping")
    if not isinstance(source, (str, Path)):
        if not hasattr(source, "model_type"):
            raise PlanError(f"{with_article(type(source).__name__)} is not a configuration", do=f"give {KINDS}")
        return source
    path = config_file(source)
    try:
        values = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise PlanError(f"{path} is not JSON", found=str(error), do="give the config.json of a Hugging Face model") from None
    return _configuration_of(values, str(path))


def _configuration_of(values: dict[str, Any], origin: str) -> Any:
    """Create the configuration object of a mapping; refuse unknown types and misspelled keys."""
    try:
        import transformers
        from transformers import CONFIG_MAPPING, AutoConfig
    except ImportError:
        raise PlanError("a configuration needs transformers", do="pip install 'streamfx[plan]'") from None
    if not isinstance(values, dict) or "model_type" not in values:
        raise PlanError(f"{origin} has no model_type", do="give the config.json of a Hugging Face model")
    known_types, model_type = list(CONFIG_MAPPING), values["model_type"]
    if model_type not in known_types:
        asked = f"{origin} has a model_type that the installed transformers ({transformers.__version__}) does not know"
        hint = did_you_mean(model_type, known_types, cutoff=0.7)
        raise PlanError(asked, found=repr(model_type), do=f"{hint}give the config.json of a Hugging Face model")
    try:
        config = AutoConfig.for_model(**values)
    except Exception as error:
        asked = f"{origin} is not a configuration that the installed transformers ({transformers.__version__}) can read"
        raise PlanError(asked, found=describe_error(error), do="check its model_type and its sizes") from None
    for key, meant in find_misspellings(values, config):
        asked = f"{origin} has a key that a configuration of type {model_type!r} does not know"
        raise PlanError(asked, found=repr(key), do=f"did you mean {meant!r}? Otherwise that would have its default")
    return config


def build_model(source: Any, dtype: str = "bfloat16", lora_rank: int | None = None, quantize: str | None = None) -> nn.Module:
    """Build the model of a configuration on the meta device, optionally quantized and with adapters. A module is not rebuilt."""
    model = source if isinstance(source, nn.Module) else language_model(configuration(source), TYPES[dtype], "meta")
    if any(not isinstance(tensor, FakeTensor) and not tensor.is_meta for tensor in model.parameters()):
        raise PlanError(
            "a model must be on the meta device for a plan",
            found="parameters with data",
            do="create it under torch.device('meta')",
        )
    model = model if quantize is None else quantized(model, quantize)
    return model if lora_rank is None else with_adapters(model, lora_rank)


def language_model(config: Any, dtype: torch.dtype, device: str) -> nn.Module:
    """Create the causal language model of a configuration (or of its text configuration) with new parameters."""
    from transformers import AutoModelForCausalLM

    config = getattr(config, "get_text_config", lambda: config)()
    _check_sizes(config)
    config.use_cache = False
    try:
        with torch.device(device):
            model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except Exception as error:
        asked = f"transformers cannot build a causal language model of type {config.model_type!r}"
        raise PlanError(
            asked, found=describe_error(error), do="give the configuration of a decoder, with sizes that fit together"
        ) from error
    return model.train()


def _check_sizes(config: Any) -> None:
    """Raise `PlanError` for a size below one (transformers would build a model that computes nothing) or too many layers."""
    for name in SIZES:
        size = size_of(config, name)
        if isinstance(size, int) and size < 1:
            do = f"give {name} as a whole number, 1 or more"
            raise PlanError(f"a configuration of type {config.model_type!r} has an invalid size", found=f"{name} = {size}", do=do)
    layers = getattr(config, LAYERS, None)
    if isinstance(layers, int) and layers > MAX_LAYERS:
        asked = f"plans are limited to {MAX_LAYERS:,} layers"
        raise PlanError(asked, found=f"{LAYERS} = {layers:,}", do=f"give {LAYERS} as a number up to {MAX_LAYERS:,}")


def size_of(config: Any, name: str) -> Any:
    """Return a size of a configuration; None if it has none, or one for each layer, which transformers refuses to return."""
    try:
        return getattr(config, name, None)
    except Exception:
        return None


class LoraLinear(nn.Module):
    """A frozen linear layer plus a trained low-rank product."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        weight = base.weight
        settings: dict[str, Any] = {"bias": False, "device": weight.device, "dtype": weight.dtype}
        self.base = base
        self.down = nn.Linear(base.in_features, rank, **settings)
        self.up = nn.Linear(rank, base.out_features, **settings)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def with_adapters(model: nn.Module, rank: int) -> nn.Module:
    """Freeze a model and add an adapter to each linear layer except the head."""
    model.requires_grad_(False)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and child is not head and not isinstance(module, LoraLinear):
                setattr(module, name, LoraLinear(child, rank))
    return model


def loss_of(model: nn.Module) -> Callable[..., Tensor]:
    """Return a function that computes the loss, as a training loop does, and keeps no other output."""

    def loss(**inputs: Tensor) -> Tensor:
        """Return the model's loss, its scalar output, or the cross-entropy of its logits."""
        outputs = model(**inputs)
        result = getattr(outputs, "loss", None)
        if result is None and isinstance(outputs, Mapping):
            result = outputs.get("loss")
        if result is None:
            result = outputs[0] if isinstance(outputs, (tuple, list)) else outputs
        if result.dim() == 0:
            return result
        labels = inputs["labels"]
        return F.cross_entropy(result.flatten(0, -2).float(), labels.flatten())

    return loss


def language_inputs(batch: int, length: int) -> dict[str, Tensor]:
    """Return token ids that are also the labels."""
    ids = torch.empty(batch, length, dtype=torch.int64, device="meta")
    return {"input_ids": ids, "labels": ids}


# -- misspelled keys of a configuration: transformers stores unknown keys silently and uses the default for the intended one


MIN_SIMILARITY = 0.75  # similarity above which one word counts as a misspelling of another


def find_misspellings(values: Mapping[str, Any], config: Any) -> Iterator[tuple[str, str]]:
    """Yield the misspelled keys of a mapping and the intended names, including those of nested configurations.

    An unknown key may be intended for other programs. It counts as a misspelling only if it resembles a known key that
    is missing.
    """
    try:
        default_names = {*vars(type(config)()), *getattr(config, "attribute_map", {})}
    except Exception:  # a composite configuration has no defaults
        return
    known_names = default_names | _read_by(type(config))
    missing = sorted(name for name in default_names - values.keys() if not name.startswith("_"))
    for key, value in values.items():
        config_value = vars(config).get(key)
        if isinstance(value, Mapping) and hasattr(config_value, "model_type"):
            yield from find_misspellings(value, config_value)
        elif config_value is not None and key not in known_names and (intended := _intended_name(key, missing)):
            yield key, intended


def _intended_name(key: str, missing: list[str]) -> str | None:
    """Return the first missing name that a key resembles.

    >>> names = ["num_attention_heads", "num_hidden_layers", "sliding_window", "pad_token_id"]
    >>> [_intended_name(key, names) for key in ("num_hiden_layers", "num_layers", "slidingWindow")]
    ['num_hidden_layers', 'num_hidden_layers', 'sliding_window']
    >>> _intended_name("is_decoder", ["is_encoder_decoder"])
    >>> [_intended_name(key, names) for key in ("sliding_window_pattern", "use_sliding_window", "sep_token_id", "layers")]
    [None, None, None, None]
    """
    return next((name for is_nearly in (_is_misspelling, _leaves_words_out) for name in missing if is_nearly(key, name)), None)


def _is_misspelling(key: str, name: str) -> bool:
    """Return whether the words of the two names are pairwise similar, or differ only in separators and case."""
    pairs = list(zip(key.split("_"), name.split("_"), strict=False))
    same_length = key.count("_") == name.count("_")
    is_joined = key.replace("_", "").lower() == name.replace("_", "").lower()
    return is_joined or (
        same_length and all(SequenceMatcher(None, word, intended_word).ratio() >= MIN_SIMILARITY for word, intended_word in pairs)
    )


def _leaves_words_out(key: str, name: str) -> bool:
    """Return whether a key is the name without some inner words. Flags (`is_decoder`) are exempt: a shorter one has its
    own meaning.
    """
    short, long = key.split("_"), name.split("_")
    ends = len(short) > 1 and short[0] != "is" and (short[0], short[-1]) == (long[0], long[-1])
    return ends and set(short) < set(long)


def _read_by(kind: type) -> set[str]:
    """Return the constructor arguments and the attributes of a configuration's classes."""
    classes = [base for base in kind.__mro__ if base is not object]
    parameters = {name for base in classes for name in inspect.signature(vars(base).get("__init__", base)).parameters}
    return parameters | {name.removeprefix("_") for base in classes for name in vars(base)}
