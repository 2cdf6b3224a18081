"""Which keywords of `explain(model, ...)` are options of the backend, and which does the model take?"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from streamfx.options import NAMES, merged


def options_among(
    model: Callable[..., Any], options: Any, keywords: Mapping[str, Any], origin: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The backend's options, and the arguments of the model.

    An option's name is an option, unless the model names an argument so: what is only gathered by `**kwargs` is not named.
    """
    own = _named(model)
    named = {name: value for name, value in keywords.items() if name in NAMES and name not in own}
    return merged(options, named, origin), {name: value for name, value in keywords.items() if name not in named}


def _named(model: Callable[..., Any]) -> set[str]:
    try:
        parameters = inspect.signature(getattr(model, "forward", model)).parameters.values()
    except (TypeError, ValueError):  # of what cannot be called, or is written in C
        return set()
    return {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}
