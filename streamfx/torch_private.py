"""Every use of torch's private interfaces, each with the versions it was checked on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._decomp import get_decompositions  # 2.11, 2.13
from torch._dynamo.backends.common import aot_autograd  # 2.11, 2.13
from torch._functorch.partitioners import default_partition  # 2.11, 2.13
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily  # 2.11, 2.13

__all__ = [
    "FakeTensor",
    "aot_autograd",
    "compile_with_inductor",
    "default_partition",
    "get_decompositions",
    "is_held_by_model",
    "keep_saved_tensors",
    "placeholder_source",
    "unset_fake_temporarily",
]


def keep_saved_tensors() -> None:
    """Let the backward run with `retain_graph=True` at any time: saved tensors are freed, never reused (2.11, 2.13).

    Call it from a forward compiler, which runs after partitioning.
    """
    context = torch._guards.TracingContext.try_get()
    metadata = getattr(context, "fw_metadata", None)
    if metadata is not None:
        metadata.bw_donated_idxs = []


def placeholder_source(node: fx.Node) -> str:
    """Where Dynamo found an input, as `L['self']._modules['0']._parameters['weight']`; empty if it is unknown (2.11, 2.13)."""
    argument = node.meta.get("grapharg")
    source = getattr(argument, "source", None)
    name = getattr(source, "name", "") if source is not None else ""
    return str(name() if callable(name) else name)


def is_held_by_model(node: fx.Node) -> bool:
    """Whether an input is an attribute of a module or a global, rather than an argument of the call (2.11, 2.13)."""
    source = placeholder_source(node)
    return (
        source.startswith("G[") or "._buffers[" in source or "._modules[" in source or source.startswith("L['self'].")
    )


def register_logger(name: str) -> None:
    """Make `TORCH_LOGS="+name"` control the logger `name` (2.11, 2.13)."""
    from torch._logging._internal import log_registry

    if name not in log_registry.log_alias_to_log_qnames:
        log_registry.register_log(name, name)
        torch._logging._internal._init_logs()


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Hand a text to `TORCH_TRACE` for tlparse (2.11, 2.13)."""
    torch._logging.trace_structured(
        "artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text
    )


def compile_with_inductor(module: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    """Compile a graph for the shapes of `inputs`; called as f(*inputs) (2.11, 2.13)."""
    from torch._inductor import standalone_compile
    from torch.utils._python_dispatch import _disable_current_modes

    with torch.no_grad(), _disable_current_modes():  # AOTAutograd watches a graph's first run with a mode of its own
        compiled = standalone_compile(module, inputs, dynamic_shapes="from_example_inputs", options={})
    result: Callable[..., Any] = compiled
    return result


Compiler = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]
