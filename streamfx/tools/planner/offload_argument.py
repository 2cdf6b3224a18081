"""The argument `offload` of a plan: the backend's option, and weights on the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from streamfx.errors import OptionError
from streamfx.options import merge_options

PARAMETERS, ORIGIN = "parameters", "streamfx.plan(...)"
Check = tuple[bool, str, str, str]  # whether a request is refused, and the error: asked, found, do


def split_offload(offload: Any, options: Mapping[str, Any]) -> tuple[bool, dict[str, Any]]:
    """Return whether weights are on the host, and the backend's options with the rest of `offload`.

    >>> split_offload("parameters,inputs", {}), split_offload(["attention"], {"save": "products"}), split_offload((), {})
    ((True, {'offload': 'inputs'}), (False, {'save': 'products', 'offload': 'attention'}), (False, {}))
    """
    if not isinstance(offload, (str, Sequence)):
        return False, merge_options(options, {"offload": offload}, ORIGIN)  # refused with the option's values
    names = offload if isinstance(offload, str) else ",".join(map(str, offload))
    values = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    rest = [value for value in values if value != PARAMETERS]
    if len(rest) > 1:
        do = "give one of them: 'attention' includes 'inputs'"
        raise OptionError("offload has one value besides 'parameters'", found=", ".join(map(repr, rest)), do=do)
    return PARAMETERS in values, merge_options(options, {"offload": rest[0]} if rest else {}, ORIGIN)


def checks_of_host_weights(request: SimpleNamespace) -> Iterator[Check]:
    """Yield checks of what cannot be planned with weights on the host."""
    asked, options = "weights on the host are planned for one device", request.options
    yield request.world > 1, asked, f"a world of {request.world}", "omit world, or offload='parameters'"
    asked = "weights on the host cannot be planned"
    yield request.objective != "sft", asked, f"the objective {request.objective!r}", "plan the objective 'sft'"
    yield request.quantize is not None, asked, f"quantize={request.quantize!r}", "omit quantize: FSDP2 copies plain weights"
    yield request.frontier, asked, "a frontier", "omit frontier"
    every = options.get("keep_every", 1)
    asked, do = "FSDP2 saves the input of each layer", "omit keep_every, or give offload='parameters,inputs'"
    yield every not in (1, "auto"), asked, f"keep_every={every}", do
    asked = "a budget is divided among stages of one graph, and FSDP2's layers are separate graphs"
    budget = options.get("memory_budget")
    yield budget is not None, asked, f"memory_budget={budget!r}", "give memory=, which the plan is compared with"
