"""Keys of a configuration that are nearly those that its class knows: transformers keeps any, and goes on with the default."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher
from typing import Any

NEAR = 0.75  # how alike words are, of which one was meant to be the other


def misspelt_in(values: Mapping[str, Any], config: Any) -> Iterator[tuple[str, str]]:
    """The keys of a mapping that a configuration was made of, and those that were meant; of parts of it, too.

    A key that is not known may be there for others to read. It is taken for a known one if it is nearly that, which is missing.
    """
    try:
        kept = {*vars(type(config)()), *getattr(config, "attribute_map", {})}
    except Exception:  # a configuration that is put together of others has no defaults
        return
    known = kept | _read_by(type(config))
    missing = sorted(name for name in kept - values.keys() if not name.startswith("_"))
    for key, value in values.items():
        own = vars(config).get(key)
        if isinstance(value, Mapping) and hasattr(own, "model_type"):
            yield from misspelt_in(value, own)
        elif own is not None and key not in known and (meant := _meant(key, missing)):
            yield key, meant


def _meant(key: str, missing: list[str]) -> str | None:
    """The first name that a key is nearly.

    >>> names = ["num_attention_heads", "num_hidden_layers", "sliding_window", "pad_token_id"]
    >>> [_meant(key, names) for key in ("num_hiden_layers", "num_layers", "slidingWindow")]
    ['num_hidden_layers', 'num_hidden_layers', 'sliding_window']
    >>> _meant("is_decoder", ["is_encoder_decoder"])
    >>> [_meant(key, names) for key in ("sliding_window_pattern", "use_sliding_window", "sep_token_id", "layers")]
    [None, None, None, None]
    """
    return next((name for is_nearly in (_is_misspelt, _leaves_words_out) for name in missing if is_nearly(key, name)), None)


def _is_misspelt(key: str, name: str) -> bool:
    """Whether each word is one of the name's, or nearly, or words are not set apart."""
    pairs = list(zip(key.split("_"), name.split("_"), strict=False))
    are_as_many = key.count("_") == name.count("_")
    is_joined = key.replace("_", "").lower() == name.replace("_", "").lower()
    return is_joined or (are_as_many and all(SequenceMatcher(None, one, other).ratio() >= NEAR for one, other in pairs))


def _leaves_words_out(key: str, name: str) -> bool:
    """Whether a key is a name without some words in its middle. What a model is may be less than another is: is_decoder."""
    short, long = key.split("_"), name.split("_")
    ends = len(short) > 1 and short[0] != "is" and (short[0], short[-1]) == (long[0], long[-1])
    return ends and set(short) < set(long)


def _read_by(kind: type) -> set[str]:
    """What the classes of a configuration take, and what they have by name."""
    classes = [one for one in kind.__mro__ if one is not object]
    taken = {name for one in classes for name in inspect.signature(vars(one).get("__init__", one)).parameters}
    return taken | {name.removeprefix("_") for one in classes for name in vars(one)}
