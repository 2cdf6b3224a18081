"""Separate the keywords of `explain(model, ...)` into backend options and arguments of the model."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from streamfx.argument_checks import describe_value, did_you_mean
from streamfx.errors import OptionError
from streamfx.frontend.backend import streambp
from streamfx.options import NAMES, merge_options, refuse_positional, validate_options
from streamfx.tools.inspect.side_effect_guard import ENABLED, modules_of, original
from streamfx.torch_private.dynamo import backend_of, unwrap_compiled

MIN_SIMILARITY = 0.6  # similarity above which a keyword is a misspelled option
MIN_SIMILARITY_WITH_KWARGS = 0.8  # the same for a model that takes **kwargs
BIND_IT = "to pass it to the model, bind it: functools.partial(model, name=value)"


def split_options(
    model: Callable[..., Any], options: Any, positional: Iterable[Any], keywords: Mapping[str, Any], origin: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the backend's options and the arguments of the model.

    A keyword with the name of an option is an option, unless the model names such an argument; `**kwargs` does not count as
    naming. A keyword that resembles an option, or that the model does not accept, is refused: the model would silently swallow
    it, or fail. Without explicit options, those that the model was compiled with apply.
    """
    refuse_positional(positional, origin)
    accepted, takes_others = _accepted_arguments(original(model))
    for name, value in keywords.items():
        hint = did_you_mean(name, NAMES, MIN_SIMILARITY_WITH_KWARGS if takes_others else MIN_SIMILARITY)
        if name not in accepted and name not in NAMES and (hint or not takes_others):
            takes = BIND_IT if takes_others else f"the model takes {', '.join(sorted(accepted)) or 'no keywords'}"
            asked = f"{origin} has no option {name!r}, and the model has no such argument"
            raise OptionError(asked, found=f"{name}={describe_value(value)}", do=f"{hint}{takes}")
    option_keywords = {name: value for name, value in keywords.items() if name in NAMES and name not in accepted}
    backend_options = {**compiled_options(model), **merge_options(options, option_keywords, origin)}
    return backend_options, {name: value for name, value in keywords.items() if name not in option_keywords}


def compiled_options(model: Callable[..., Any]) -> dict[str, Any]:
    """Return the options that a model was compiled or enabled with.

    For several compiled submodules, these are the options common to all.
    """
    if unwrap_compiled(model) is not None:
        return _options_of(model) or {}
    enabled = [
        options
        for module in modules_of(model)
        for call in (module._compiled_call_impl, module.__dict__.get("forward"), module)
        if (options := _options_of(call)) is not None
    ]
    common = enabled[0].items() if enabled else ()
    return {name: value for name, value in common if all(name in others and others[name] == value for others in enabled)}


def _options_of(call: Any) -> dict[str, Any] | None:
    """Return the options of a compiled or enabled callable, or None if this backend does not compile it."""
    enabled = getattr(getattr(call, ENABLED, None), "enabled", None)
    if enabled is not None:
        return dict(enabled.options)
    if unwrap_compiled(call) is None:
        return None
    function, keywords = backend_of(call)
    if isinstance(function, functools.partial):
        keywords, function = {**function.keywords, **keywords}, function.func
    return validate_options(keywords.get("options"), "torch.compile(options=...)") if function is streambp else None


def _accepted_arguments(model: Callable[..., Any]) -> tuple[set[str], bool]:
    """Return the names of the arguments that a model accepts, and whether it takes `**kwargs`."""
    try:
        parameters = list(inspect.signature(getattr(model, "forward", model)).parameters.values())
    except (TypeError, ValueError):  # not callable, or implemented in C
        return set(), True
    named = {
        parameter.name for parameter in parameters if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }
    return named, any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
