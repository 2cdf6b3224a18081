"""Private interfaces of autograd: the running backward, saved tensors, and hooks on gradients.

"(2.11, 2.13)": the torch versions on which it was tested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, fx
from torch._functorch._aot_autograd.descriptors import PlainAOTInput, SubclassGetAttrAOTInput  # 2.11, 2.13

from streamfx.node_meta import DESCRIPTION
from streamfx.torch_private import no_saved_tensor_hooks

EXCLUDED_INSIDE_OPERATORS = (  # 2.11, 2.13: dispatch keys that an operator's implementation, and a mode that calls it, exclude
    "AutogradFunctionality",
    "AutogradOther",
    "ADInplaceOrView",
    "FuncTorchDynamicLayerFrontMode",
    "FuncTorchDynamicLayerBackMode",
    "FuncTorchBatched",
)


def current_autograd_node() -> Any:
    """Return the autograd node whose backward runs this code; None if no backward is running (2.11, 2.13)."""
    return torch._C._current_autograd_node()


def backward_pass() -> int:
    """Return a unique id of the running backward; -1 if none is running (2.11, 2.13)."""
    return int(torch._C._current_graph_task_id())


def after_this_backward(call: Callable[[], None]) -> None:
    """Call a function at the end of the running backward. If the backward fails, the call is dropped (2.11, 2.13)."""
    torch.autograd.Variable._execution_engine.queue_callback(call)  # type: ignore[attr-defined]


def saved_tensors_are_packed() -> bool:
    """Return whether saved-tensor hooks are set in this thread: they receive every tensor saved for backward (2.11, 2.13)."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def autocast_is_on() -> bool:
    """Return whether autocast is enabled on any device (2.11, 2.13)."""
    return bool(torch._C._is_any_autocast_enabled())


def no_autocast() -> Any:
    """Return a context without autocast, in which AOTAutograd also runs compiled code (2.11, 2.13)."""
    return torch._C._DisableAutocast()


def is_transformed() -> bool:
    """Return whether this code runs inside a functorch transform, such as `vmap` (2.11, 2.13)."""
    return bool(torch._C._are_functorch_transforms_active())


def are_gradients_awaited(tensors: Iterable[Tensor]) -> bool:
    """Return whether some consumer uses the gradients of these tensors as soon as they are computed (2.11, 2.13).

    That is a hook on a leaf's gradient, DDP (if this code is in its forward), or an existing gradient to which a new one is
    added. Hooks on autograd's AccumulateGrad nodes (`grad_fn.next_functions[0][0].register_hook`) cannot be detected.
    """
    return is_in_data_parallel() or any(
        tensor.is_leaf and _is_awaited(tensor) for tensor in tensors if isinstance(tensor, Tensor)
    )


def _is_awaited(tensor: Tensor) -> bool:
    """Return whether a leaf has hooks on its gradient, or a gradient to which a new one is added."""
    return bool(tensor._post_accumulate_grad_hooks or tensor._backward_hooks) or tensor.grad is not None


def is_in_data_parallel() -> bool:
    """Return whether this code runs in the forward of DistributedDataParallel (2.11, 2.13)."""
    return distributed.is_available() and torch.nn.parallel.DistributedDataParallel._active_ddp_module is not None


def inputs_in_results() -> list[int] | None:
    """Return the indices of inputs that the graph being compiled returns or aliases; None if unknown (2.11, 2.13)."""
    from torch._functorch._aot_autograd.schemas import OutputType

    context = torch._guards.TracingContext.try_get()
    metadata = getattr(context, "fw_metadata", None)
    kinds = (OutputType.alias_of_input, OutputType.is_input)
    return None if metadata is None else [output.base_idx for output in metadata.output_info if output.output_type in kinds]


def owner_indices(graph: fx.Graph) -> list[int | None]:
    """Return, for each input of AOTAutograd's graph, the index of the Dynamo input that it is, or is a part of (2.11, 2.13).

    A part is for example the local shard of a DTensor. None for an input that is neither, such as an effect token.
    """
    indices = []
    for node in graph.find_nodes(op="placeholder"):
        description = node.meta.get(DESCRIPTION)
        while isinstance(description, SubclassGetAttrAOTInput):
            description = description.base
        indices.append(description.idx if isinstance(description, PlainAOTInput) else None)
    return indices


def is_inner_tensor(node: fx.Node) -> bool:
    """Return whether an input of AOTAutograd's graph is an inner tensor of a subclass: a DTensor's shard (2.11, 2.13)."""
    return isinstance(node.meta.get(DESCRIPTION), SubclassGetAttrAOTInput)


def inputs_with_gradients(graph: fx.Graph) -> list[bool]:
    """Return, for each input of the forward graph being compiled, whether it may require a gradient; [] if unknown.

    True for inner tensors of tensor subclasses: autograd checks the subclass tensor, and torch recompiles if its
    `requires_grad` changes. The inner tensor's flag is unreliable: `DTensor.from_local` copies a result's to it, but
    AOTAutograd records False (2.11, 2.13).
    """
    context = torch._guards.TracingContext.try_get()
    inputs = getattr(getattr(context, "fw_metadata", None), "input_info", ())
    nodes = graph.find_nodes(op="placeholder")
    if len(inputs) != len(nodes):
        return []
    return [bool(info.requires_grad) or is_inner_tensor(node) for info, node in zip(inputs, nodes, strict=True)]


def nodes_to_execute(edges: Iterable[tuple[Any, int]]) -> frozenset[Any]:
    """Return the autograd nodes at the ends of some edges that the running backward will execute, except leaves (2.11, 2.13).

    `edges`: (node or None, index of its input), as in `grad_fn.next_functions`. Call it only inside a backward.
    """
    nodes = {node for node, _ in edges if node is not None and not hasattr(node, "variable")}
    return frozenset(node for node in nodes if torch._C._will_engine_execute_node(node))


@contextmanager
def autograd_inside_operators() -> Iterator[None]:
    """Context manager: autograd and `vmap` work even inside an operator's implementation, which excludes them (2.11, 2.13).

    The user's saved-tensor hooks do not see what is saved here: checkpointing counts saved tensors, and would count these.
    """
    with ExitStack() as stack:
        stack.enter_context(no_saved_tensor_hooks())
        for name in EXCLUDED_INSIDE_OPERATORS:
            stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(getattr(torch._C.DispatchKey, name), False))
        stack.enter_context(torch.enable_grad())
        yield


def saves_tensors_themselves() -> bool:
    """Return whether autograd saves tensors as they are: no saved-tensor hooks of the user replace them (2.11, 2.13)."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is None
