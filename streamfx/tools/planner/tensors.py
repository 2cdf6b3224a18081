"""Layers cut among ranks by the plan that a configuration comes with: what transformers does for `tp_plan="auto"`.

Its own code cuts them, so that the graph is the one that such a rank runs. A head whose logits are gathered is left whole: what
is gathered are logits of all rows at once, while a whole head streams.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from streamfx.errors import PlanError

GATHERED = "colwise_gather_output"
NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@contextmanager
def layers_cut(model: nn.Module, mesh: Any) -> Iterator[None]:
    """The model with its layers cut over a mesh, in place, and as it was afterwards."""
    kept = [(module, dict(module.__dict__), dict(module._parameters)) for module in model.modules()]
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    apply_tensor_parallelism(model, mesh, styles_of(model))
    try:
        yield
    finally:
        for module, attributes, parameters in kept:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            module._parameters.clear()
            module._parameters.update(parameters)


def styles_of(model: nn.Module) -> dict[str, str]:
    """How each module that is cut, and each of its parameters, is cut: by name. No module where there is no plan."""
    plan = getattr(model, "tp_plan", None) or {}
    by_name = {name: plan.get(NUMBER.sub("*", name)) for name, _ in model.named_modules()}
    styles = {name: style for name, style in by_name.items() if style not in (None, GATHERED)}
    inner = {name: styles.get(name.rpartition(".")[0]) for name, _ in model.named_parameters()}
    return {**styles, **{name: style for name, style in inner.items() if style is not None}}


def check_plan(model: nn.Module) -> None:
    """Refuse a model that comes with no plan, and a transformers that has none of the code."""
    do = "plan with tensor=1, or with a transformers that has it"
    try:
        import transformers.distributed.tensor_parallel  # noqa: F401
    except ImportError:
        raise PlanError("layers are cut as transformers cuts them", found="a transformers that cannot", do=do) from None
    if not styles_of(model):
        raise PlanError("layers are cut by the plan of a configuration", found="a model without such a plan", do=do)
