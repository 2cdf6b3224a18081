"""Which keywords of `explain(model, ...)` are options of the backend, and which does the model take?"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from streamfx.argument_checks import described, did_you_mean
from streamfx.errors import OptionError
from streamfx.frontend.backend import streambp
from streamfx.options import NAMES, checked, merged, refuse_positional
from streamfx.tools.inspect.side_effect_guard import ENABLED, modules_of, original
from streamfx.torch_private.dynamo import backend_of, inside_of_compiled

NEAR, NEARLY = 0.6, 0.8  # how alike a name is to an option's that the model does not take, or that it would swallow
MISSPELT = "if the model is to have it, bind it: functools.partial(model, name=value)"


def options_among(
    model: Callable[..., Any], options: Any, positional: Iterable[Any], keywords: Mapping[str, Any], origin: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The backend's options, and the arguments of the model.

    An option's name is an option, unless the model names an argument so: what is only gathered by `**kwargs` is not named. A name
    that is nearly an option's, or that the model does not take, is refused: it would be given to the model, or swallowed.
    Where nothing is asked for, what the model was compiled with holds.
    """
    refuse_positional(positional, origin)
    own, takes_others = _named(original(model))
    for name, value in keywords.items():
        hint = did_you_mean(name, NAMES, NEARLY if takes_others else NEAR)
        if name not in own and name not in NAMES and (hint or not takes_others):
            takes = MISSPELT if takes_others else f"the model takes {', '.join(sorted(own)) or 'no keywords'}"
            asked = f"{origin} has no option {name!r}, and the model names no such argument"
            raise OptionError(asked, found=f"{name}={described(value)}", do=f"{hint}{takes}")
    named = {name: value for name, value in keywords.items() if name in NAMES and name not in own}
    given = {**compiled_options(model), **merged(options, named, origin)}
    return given, {name: value for name, value in keywords.items() if name not in named}


def compiled_options(model: Callable[..., Any]) -> dict[str, Any]:
    """The options that a model was compiled or enabled with. Where its parts were, those that all of these have in common."""
    if inside_of_compiled(model) is not None:
        return _options_of(model) or {}
    found = [
        options
        for module in modules_of(model)
        for call in (module._compiled_call_impl, module.__dict__.get("forward"), module)
        if (options := _options_of(call)) is not None
    ]
    return (
        {}
        if not found
        else {name: value for name, value in found[0].items() if all(name in one and one[name] == value for one in found)}
    )


def _options_of(call: Any) -> dict[str, Any] | None:
    """Of what stands in for a call; None for what is not compiled by this backend."""
    enabled = getattr(getattr(call, ENABLED, None), "enabled", None)
    if enabled is not None:
        return dict(enabled.options)
    if inside_of_compiled(call) is None:
        return None
    function, keywords = backend_of(call)
    if isinstance(function, functools.partial):
        keywords, function = {**function.keywords, **keywords}, function.func
    return checked(keywords.get("options"), "torch.compile(options=...)") if function is streambp else None


def _named(model: Callable[..., Any]) -> tuple[set[str], bool]:
    """The arguments that a model names, and whether it takes others."""
    try:
        parameters = list(inspect.signature(getattr(model, "forward", model)).parameters.values())
    except (TypeError, ValueError):  # of what cannot be called, or is written in C
        return set(), True
    named = {one.name for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)}
    return named, any(one.kind is one.VAR_KEYWORD for one in parameters)
