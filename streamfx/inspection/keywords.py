"""Which keywords of `explain(model, ...)` are options of the backend, and which does the model take?"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from streamfx.arguments import described, did_you_mean
from streamfx.errors import OptionError
from streamfx.options import NAMES, merged, refuse_positional

NEAR, NEARLY = 0.6, 0.8  # how alike a name is to an option's that the model does not take, or that it would swallow
MISSPELT = "if the model is to have it, bind it: functools.partial(model, name=value)"


def options_among(
    model: Callable[..., Any], options: Any, positional: Iterable[Any], keywords: Mapping[str, Any], origin: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The backend's options, and the arguments of the model.

    An option's name is an option, unless the model names an argument so: what is only gathered by `**kwargs` is not named. A name
    that is nearly an option's, or that the model does not take, is refused: it would be given to the model, or swallowed.
    """
    refuse_positional(positional, origin)
    own, takes_others = _named(model)
    for name, value in keywords.items():
        hint = did_you_mean(name, NAMES, NEARLY if takes_others else NEAR)
        if name not in own and name not in NAMES and (hint or not takes_others):
            takes = MISSPELT if takes_others else f"the model takes {', '.join(sorted(own)) or 'no keywords'}"
            asked = f"{origin} has no option {name!r}, and the model names no such argument"
            raise OptionError(asked, found=f"{name}={described(value)}", do=f"{hint}{takes}")
    named = {name: value for name, value in keywords.items() if name in NAMES and name not in own}
    return merged(options, named, origin), {name: value for name, value in keywords.items() if name not in named}


def _named(model: Callable[..., Any]) -> tuple[set[str], bool]:
    """The arguments that a model names, and whether it takes others."""
    try:
        parameters = list(inspect.signature(getattr(model, "forward", model)).parameters.values())
    except (TypeError, ValueError):  # of what cannot be called, or is written in C
        return set(), True
    named = {one.name for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)}
    return named, any(one.kind is one.VAR_KEYWORD for one in parameters)
