"""A tiny configuration of any model type, by general rules.

A configuration starts from its defaults: sizes shrink by name, and never grow; a few layers are kept, of every kind; dropout is
off. configs.json has the sizes, and in `overrides` the values that no rule gives, because they have to fit together in one model.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

DATA = json.loads((Path(__file__).parent / "configs.json").read_text())
_CONSTANTS: dict[str, int] = DATA["constants"]
VOCABULARY, INNER, HEADS, HEAD, LAYERS = (_CONSTANTS[name] for name in ("VOCABULARY", "INNER", "HEADS", "HEAD", "LAYERS"))
# the first pattern that matches the complete name of a number limits the number
SIZES: list[tuple[str, int]] = [(pattern, _CONSTANTS.get(most, most)) for pattern, most in DATA["sizes"]]
KEY_HEADS = SIZES[2][0]
# numbers that the configuration leaves open and the model requires
OPEN: dict[str, int] = {name: _CONSTANTS.get(number, number) for name, number in DATA["open"].items()}
OVERRIDES: dict[str, dict[str, Any]] = DATA["overrides"]
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks")
TOKEN = re.compile(r".*(_token_id|_token_index|_index)")


def tiny(model_type: str) -> Any:
    """The tiny configuration of a model type."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    own = OVERRIDES.get(model_type, {})
    return kind(**merged(shrunk(kind()), {name: value for name, value in own.items() if name != "why"}))


def merged(found: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Overrides, which may reach into the configurations of parts; None removes a value."""
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
    if re.fullmatch(KEY_HEADS, name) and value == getattr(config, "num_attention_heads", None):
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
    """Layers of every kind: lists with an entry per layer are cut to the layers that add a new value."""
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
