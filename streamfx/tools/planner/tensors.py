"""Tensor parallelism by the plan of a configuration, as transformers applies it for `tp_plan="auto"`.

Transformers' own code splits the layers, so the graph equals that of a real rank. A head whose logits would be gathered
is not split: the gather needs the logits of all positions at once, while an unsplit head can be chunked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from streamfx.errors import PlanError

GATHERED = "colwise_gather_output"
LAYER_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")


@contextmanager
def tensor_parallel_layers(model: nn.Module, mesh: Any) -> Iterator[None]:
    """Context manager: split the layers over `mesh`, in place, as the model's `tp_plan` says.

    The original modules are restored when the block ends, even if it raises an error.
    """
    saved = [(module, dict(module.__dict__), dict(module._parameters)) for module in model.modules()]
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    apply_tensor_parallelism(model, mesh, styles_of(model))
    try:
        yield
    finally:
        for module, attributes, parameters in saved:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            module._parameters.clear()
            module._parameters.update(parameters)


def styles_of(model: nn.Module) -> dict[str, str]:
    """Return the parallel style of each split module and parameter by name; empty if there is no plan."""
    plan = getattr(model, "tp_plan", None) or {}
    by_name = {name: plan.get(LAYER_INDEX.sub("*", name)) for name, _ in model.named_modules()}
    styles = {name: style for name, style in by_name.items() if style not in (None, GATHERED)}
    inner = {name: styles.get(name.rpartition(".")[0]) for name, _ in model.named_parameters()}
    return {**styles, **{name: style for name, style in inner.items() if style is not None}}


def check_plan(model: nn.Module) -> None:
    """Refuse a model without a plan, and a version of transformers without the code for it."""
    do = "plan with tensor=1, or install a version of transformers that supports it"
    try:
        import transformers.distributed.tensor_parallel  # noqa: F401
    except ImportError:
        raise PlanError(
            "tensor parallelism needs transformers' code for it", found="a version of transformers without it", do=do
        ) from None
    if not styles_of(model):
        raise PlanError("tensor parallelism needs the tp_plan of a configuration", found="a model without one", do=do)
