"""Find misspelled keys in a configuration: transformers stores unknown keys silently and uses the default for the
intended one.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher
from typing import Any

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
