"""A request for a plan as a command, or as a call if its model or its options have no place on the command line."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from streamfx.tools.planner.model_names import BACKEND_OPTIONS, PLAN_ARGUMENTS, TOKEN_COUNTS


def command_of(request: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """Return `streamfx plan MODEL --seq 128K ...`, or `streamfx.plan(model, seq=131072, ...)`.

    Args:
        request: the arguments of `plan` by name, with the backend's options as `options`.
        defaults: their default values, which are omitted; the length is omitted only if it is searched for.
    """
    model, options = request["model"], request["options"]
    values = {name: request[name] for name in PLAN_ARGUMENTS if name == "seq" or request[name] != defaults[name]}
    if request["max_length"]:
        del values["seq"]
    values = {**values, **{name: value for name, value in options.items() if value != "auto"}}
    if request["offload"] and options.get("offload", "none") != "none":
        values["offload"] = f"{request['offload']},{options['offload']}"
    if not isinstance(model, (str, Path)) or not options.keys() <= set(BACKEND_OPTIONS) or request["inputs"] is not None:
        arguments = ", ".join(("model", *(f"{name}={value!r}" for name, value in values.items())))
        return f"streamfx.plan({arguments})"
    flags = " ".join(word for name, value in values.items() for word in _flag(name, value))
    return f"streamfx plan {shlex.quote(str(model))} {flags}{'' if request['baselines'] else ' --no-baselines'}"


def _flag(name: str, value: Any) -> Iterator[str]:
    """Yield the words of an argument; a number of tokens that is a multiple of 1,024 has the suffix K."""
    yield f"--{name.replace('_', '-')}"
    if name in TOKEN_COUNTS and value % 1024 == 0:
        yield f"{value >> 10}K"
    elif value is not True:
        yield shlex.quote(str(value))
