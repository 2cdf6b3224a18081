"""Private interfaces of autograd: who runs, for whom, and who waits for gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, fx
from torch._functorch._aot_autograd.descriptors import PlainAOTInput, SubclassGetAttrAOTInput  # 2.11, 2.13

from streamfx.node_meta import DESCRIPTION

SEEN_OUTSIDE_OF_OPERATORS = (  # 2.11, 2.13: what an operator's own code, and a mode that calls it, leave out
    "AutogradFunctionality",
    "AutogradOther",
    "ADInplaceOrView",
    "FuncTorchDynamicLayerFrontMode",
    "FuncTorchDynamicLayerBackMode",
    "FuncTorchBatched",
)


def current_autograd_node() -> Any:
    """The node of autograd's graph that this code runs for; None where no backward is running (2.11, 2.13)."""
    return torch._C._current_autograd_node()


def backward_pass() -> int:
    """A number for the backward pass that this code runs in, which no other has; -1 in none (2.11, 2.13)."""
    return int(torch._C._current_graph_task_id())


def after_this_backward(call: Callable[[], None]) -> None:
    """Let autograd call a function at the end of the backward pass that is running. If that fails, it drops it (2.11, 2.13)."""
    torch.autograd.Variable._execution_engine.queue_callback(call)  # type: ignore[attr-defined]


def saved_tensors_are_packed() -> bool:
    """Whether hooks for saved tensors are set in this thread: they are given all that a forward half saves (2.11, 2.13)."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def autocast_is_on() -> bool:
    """Whether operators choose types by themselves, on any device (2.11, 2.13)."""
    return bool(torch._C._is_any_autocast_enabled())


def no_autocast() -> Any:
    """A context in which they do not, as AOTAutograd runs what it compiled (2.11, 2.13)."""
    return torch._C._DisableAutocast()


def is_transformed() -> bool:
    """Whether this code runs inside of a transformation of functions, such as `vmap` (2.11, 2.13)."""
    return bool(torch._C._are_functorch_transforms_active())


def are_awaited(tensors: Iterable[Tensor]) -> bool:
    """Whether somebody does something with gradients of tensors as they arrive: hooks, DDP (this code is in its forward), or the
    gradients that are there already, to which new ones are added (2.11, 2.13).

    Hooks on accumulators themselves (`grad_fn.next_functions[0][0].register_hook`) cannot be seen.
    """
    return is_in_data_parallel() or any(
        tensor.is_leaf and _is_awaited(tensor) for tensor in tensors if isinstance(tensor, Tensor)
    )


def _is_awaited(tensor: Tensor) -> bool:
    return bool(tensor._post_accumulate_grad_hooks or tensor._backward_hooks) or tensor.grad is not None


def is_in_data_parallel() -> bool:
    """Whether this code runs in DistributedDataParallel's forward (2.11, 2.13)."""
    return distributed.is_available() and torch.nn.parallel.DistributedDataParallel._active_ddp_module is not None


def inputs_in_results() -> list[int] | None:
    """Positions of the inputs that the graph being compiled returns, or parts of them; None if unknown (2.11, 2.13)."""
    from torch._functorch._aot_autograd.schemas import OutputType

    context = torch._guards.TracingContext.try_get()
    metadata = getattr(context, "fw_metadata", None)
    kinds = (OutputType.alias_of_input, OutputType.is_input)
    return None if metadata is None else [item.base_idx for item in metadata.output_info if item.output_type in kinds]


def owners(graph: fx.Graph) -> list[int | None]:
    """For each input of a traced graph, which of Dynamo's it is, or is a part of; None for others (2.11, 2.13)."""
    found = []
    for node in graph.find_nodes(op="placeholder"):
        description = node.meta.get(DESCRIPTION)
        while isinstance(description, SubclassGetAttrAOTInput):
            description = description.base
        found.append(description.idx if isinstance(description, PlainAOTInput) else None)
    return found


def is_taken_apart(node: fx.Node) -> bool:
    """Whether an input of a traced graph is a part of one of Dynamo's, which may have only that one part (2.11, 2.13)."""
    return isinstance(node.meta.get(DESCRIPTION), SubclassGetAttrAOTInput)


def asked_gradients(graph: fx.Graph) -> list[bool]:
    """Which inputs of the forward graph that is being compiled may ask for a gradient; empty if it is not known (2.11, 2.13).

    A part of a tensor subclass may: autograd asks the whole tensor, and torch compiles again if that changes. What the part
    itself says means nothing. `DTensor.from_local` gives the part of a result the result's `requires_grad`; AOTAutograd notes
    False for it.
    """
    context = torch._guards.TracingContext.try_get()
    inputs = getattr(getattr(context, "fw_metadata", None), "input_info", ())
    nodes = graph.find_nodes(op="placeholder")
    if len(inputs) != len(nodes):
        return []
    return [bool(item.requires_grad) or is_taken_apart(node) for item, node in zip(inputs, nodes, strict=True)]


def nodes_that_run(edges: Iterable[tuple[Any, int]]) -> frozenset[Any]:
    """The nodes at the end of edges that the running backward pass will run, without those of leaves (2.11, 2.13)."""
    nodes = {node for node, _ in edges if node is not None and not hasattr(node, "variable")}
    return frozenset(node for node in nodes if torch._C._will_engine_execute_node(node))


@contextmanager
def recorded_inside_operators() -> Iterator[None]:
    """Autograd records what runs inside of it, and `vmap` may, also where an operator's own code runs, of which they see nothing
    (2.11, 2.13).
    """
    with ExitStack() as stack:
        for name in SEEN_OUTSIDE_OF_OPERATORS:
            stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(getattr(torch._C.DispatchKey, name), False))
        stack.enter_context(torch.enable_grad())
        yield
