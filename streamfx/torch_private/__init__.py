"""All uses of torch's private interfaces, each with the versions on which it was tested.

The package knows torch and nothing about chunks, plans, or passes. It may import torch, `node_meta`, `errors`, and the
other modules below it; no other package uses a private interface of torch. "(2.11, 2.13)" in a docstring or comment: the
torch versions on which it was tested. AOTAutograd stores a description of each input and result in a graph's
`meta[DESCRIPTION]`; it says, for example, whose gradient a result is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import fx
from torch._decomp import get_decompositions  # 2.11, 2.13
from torch._dynamo import _trace_wrapped_higher_order_op  # noqa: F401  (2.11, 2.13: defines the operator looked up next)
from torch._dynamo.backends.common import aot_autograd  # 2.11, 2.13
from torch._functorch._aot_autograd.descriptors import (  # 2.11, 2.13
    ForwardTokenAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    SubclassGetAttrAOTInput,
    SubclassGetAttrAOTOutput,
)
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition  # 2.11, 2.13
from torch._higher_order_ops.flex_attention import flex_attention as FLEX_ATTENTION  # 2.11, 2.13
from torch._higher_order_ops.flex_attention import flex_attention_backward as FLEX_ATTENTION_BACKWARD  # 2.11, 2.13
from torch._higher_order_ops.scan import scan_op as SCAN  # 2.11, 2.13
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket  # 2.11, 2.13
from torch._prims.rng_prims import run_and_save_rng_state as SAVES_RANDOM_STATE  # 2.11, 2.13
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily  # 2.11, 2.13
from torch.amp.autocast_mode import _enter_autocast as ENTER_AUTOCAST  # 2.11, 2.13: in Dynamo graphs
from torch.amp.autocast_mode import _exit_autocast as EXIT_AUTOCAST  # 2.11, 2.13: in Dynamo graphs
from torch.overrides import enable_reentrant_dispatch  # 2.11, 2.13
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass  # 2.11, 2.13
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_iter, tree_leaves, tree_map  # 2.11, 2.13
from torch.utils._sympy.printers import PythonPrinter  # 2.11, 2.13

from streamfx.node_meta import DESCRIPTION, GRAPH_ARGUMENT

__all__ = [
    "AUTO_FUNCTIONALIZED",
    "DISABLED_TORCH_FUNCTION",
    "ENTER_AUTOCAST",
    "EXIT_AUTOCAST",
    "FLEX_ATTENTION",
    "FLEX_ATTENTION_BACKWARD",
    "SAVES_RANDOM_STATE",
    "SCAN",
    "SET_GRAD",
    "ZEROS_AND_SCATTER",
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "PythonPrinter",
    "TorchDispatchMode",
    "aot_autograd",
    "assert_true",
    "default_partition",
    "dynamo_copy",
    "dynamo_input_indices",
    "dynamo_module",
    "get_decompositions",
    "in_trace_context",
    "is_composite",
    "is_held_by_model",
    "is_sharded",
    "is_token",
    "is_traceable_wrapper_subclass",
    "keep_saved_tensors",
    "keystr",
    "min_cut_rematerialization_partition",
    "mutated_inputs",
    "no_dispatch",
    "no_function_modes",
    "no_modes",
    "no_saved_tensor_hooks",
    "placeholder_source",
    "reentrant_dispatch",
    "reset_tracing_on_error",
    "retains_graph",
    "rewrap",
    "static_inputs",
    "tree_flatten_with_path",
    "tree_iter",
    "tree_leaves",
    "tree_map",
    "unset_fake_temporarily",
    "untraced",
    "wrapper_tensor",
]

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
Compiler = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]
DISABLED_TORCH_FUNCTION = torch._C._disabled_torch_function_impl  # 2.11, 2.13
ZEROS_AND_SCATTER = torch.ops.flex_lib.zeros_and_scatter.default  # 2.11, 2.13: the gradient of an index in a score_mod
AUTO_FUNCTIONALIZED = torch.ops.higher_order.auto_functionalized_v2  # 2.11, 2.13: functional form of an operator that writes
GRADIENT_OF_CDIST = torch.ops.aten._cdist_backward.default._schema.arguments[0].name  # grad (2.11, 2.13), grad_output (2.14)
SET_GRAD = torch._C._set_grad_enabled  # 2.11, 2.13: in Dynamo graphs


def assert_true(condition: torch.Tensor, otherwise: str) -> None:
    """Raise an error with the text `otherwise` if the condition, a boolean scalar, is false when this runs, or its graph does.

    On a device, the error is raised later, without a wait (2.11, 2.13).
    """
    torch._assert_async(condition, otherwise)


def keep_saved_tensors() -> None:
    """Forbid the backward to donate (overwrite) saved tensors, so that it can run with `retain_graph=True` (2.11, 2.13).

    Changes AOTAutograd's metadata of the graph being compiled. Call this in a forward compiler, after partitioning.
    """
    context = torch._guards.TracingContext.try_get()
    donated = getattr(getattr(context, "fw_metadata", None), "bw_donated_idxs", None)
    if donated is not None:
        donated.clear()  # sharded parameters have two metadata objects, which share this list


def static_inputs() -> list[int]:
    """Return the indices of parameters and buffers among the inputs of the graph being compiled; [] if unknown (2.11, 2.13)."""
    context = torch._guards.TracingContext.try_get()
    return list(getattr(getattr(context, "fw_metadata", None), "static_input_indices", ()))


def retains_graph() -> bool:
    """Return whether the running backward retains its graph, so that it may run twice; True if none is running (2.11, 2.13)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def mutated_inputs(joint: fx.Graph) -> list[int] | None:
    """Return the indices of the inputs that the traced function mutates; None if the joint graph has no descriptions.

    A joint graph is functional: its results include the new value of each mutated input (2.11, 2.13).
    """
    descriptions = joint.output_node().meta.get(DESCRIPTION)
    if descriptions is None:
        return None
    mutated = [output.mutated_input for output in descriptions if isinstance(output, InputMutationAOTOutput)]
    placeholders = joint.find_nodes(op="placeholder")
    return [i for i, node in enumerate(placeholders) if node.meta.get(DESCRIPTION) in mutated]


def inputs_of_gradients(joint: fx.Graph, first_gradient: int) -> list[fx.Node | None] | None:
    """Return, for each result of a joint graph from index `first_gradient` on, the input whose gradient it is (2.11, 2.13).

    An entry is None if the result is not a gradient. Return None if the graph has no descriptions. A sharded tensor is several
    inputs, with a gradient each, or one None for all.
    """
    descriptions = joint.output_node().meta.get(DESCRIPTION)
    if descriptions is None:
        return None
    inputs = {node.meta[DESCRIPTION]: node for node in joint.find_nodes(op="placeholder") if DESCRIPTION in node.meta}
    return [inputs.get(_input_of(gradient)) for gradient in descriptions[first_gradient:]]


def _input_of(gradient: Any) -> Any:
    """Return the description of the input to which a gradient belongs, from the description of the gradient.

    For a part of a sharded gradient: the description of the same part of the input. None if `gradient` describes no gradient.
    """
    if isinstance(gradient, GradAOTOutput):
        return gradient.grad_of
    if isinstance(gradient, SubclassGetAttrAOTOutput):
        base = _input_of(gradient.base)
        return None if base is None else SubclassGetAttrAOTInput(base, gradient.attr)
    return None


def is_token(placeholder: fx.Node) -> bool:
    """Return whether an input is an effect token: an empty tensor that orders operators with side effects (2.11, 2.13).

    Such inputs come first.
    """
    return isinstance(placeholder.meta.get(DESCRIPTION), ForwardTokenAOTInput)


def dynamo_input_indices(graph: fx.Graph, count: int) -> list[int | None]:
    """Return, for each of the first `count` inputs of AOTAutograd's graph, its index among Dynamo's inputs (2.11, 2.13).

    Tokens are omitted. None for a part of a Dynamo input, such as the local shard of a sharded tensor.
    """
    inputs = [node for node in graph.find_nodes(op="placeholder")[:count] if not is_token(node)]
    return [getattr(node.meta.get(DESCRIPTION), "idx", None) for node in inputs]


def placeholder_source(node: fx.Node) -> str:
    """Return the Python expression for an input of a Dynamo graph; "" if unknown (2.11, 2.13).

    For example `L['self']._modules['0']._parameters['weight']`, where L are the local variables of the frame.
    """
    source = getattr(node, "_dynamo_source", None) or getattr(node.meta.get(GRAPH_ARGUMENT), "source", None)
    name = getattr(source, "name", "") if source is not None else ""
    return str(name() if callable(name) else name)


def is_held_by_model(node: fx.Node) -> bool:
    """Return whether an input of a Dynamo graph is a global, or held by a module, rather than an argument (2.11, 2.13)."""
    source = placeholder_source(node)
    return source.startswith(("G[", "L['self'].")) or "._buffers[" in source or "._modules[" in source


def is_sharded(value: Any) -> bool:
    """Return whether a tensor is a shard or a replica of a distributed tensor (2.11, 2.13)."""
    return hasattr(value, "device_mesh") and is_traceable_wrapper_subclass(value)


def rewrap(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a copy of a wrapper subclass tensor, such as a DTensor, with `change` applied to its inner tensors (2.11, 2.13)."""
    names, context = value.__tensor_flatten__()
    inner_tensors = {name: change(inner) if isinstance(inner := getattr(value, name), torch.Tensor) else inner for name in names}
    return type(value).__tensor_unflatten__(inner_tensors, context, value.shape, value.stride())


def dynamo_copy(module: fx.GraphModule) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """Copy a Dynamo graph with everything that AOTAutograd reads; also return the copy of each node (2.11, 2.13)."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(module.graph, copies))
    for node in module.graph.find_nodes(op="placeholder"):
        if hasattr(node, "_dynamo_source"):
            copies[node]._dynamo_source = node._dynamo_source
    return dynamo_module(module, graph), copies


def dynamo_module(module: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """Return a module for `graph`, with the submodules of a Dynamo module and all that AOTAutograd reads (2.11, 2.13)."""
    new_module = fx.GraphModule(module, graph)
    new_module.meta = dict(module.meta)
    for name in ("_param_name_to_source", "compile_subgraph_reason"):
        if hasattr(module, name):
            setattr(new_module, name, getattr(module, name))
    return new_module


def untraced(function: F) -> F:
    """Wrap a function so that compiled functions may call it and Dynamo does not trace it (2.11, 2.13)."""
    wrapped: F = torch.compiler.disable(function)
    return wrapped


def wrapper_tensor(cls: type[torch.Tensor], like: torch.Tensor, device: torch.device) -> Any:
    """Create a tensor of the subclass `cls` without memory, with the sizes, strides and dtype of `like` (2.11, 2.13)."""
    return torch.Tensor._make_wrapper_subclass(
        cls,
        like.size(),
        strides=like.stride(),
        storage_offset=like.storage_offset(),
        dtype=like.dtype,
        device=device,
    )


def is_composite(operator: Any) -> bool:
    """Return whether an ATen operator is implemented by other operators (CompositeImplicitAutograd) (2.11, 2.13)."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd"))


def no_dispatch() -> Any:
    """Return a context in which operators bypass `__torch_dispatch__` (2.11, 2.13)."""
    return torch._C._DisableTorchDispatch()


@contextmanager
def reentrant_dispatch() -> Iterator[None]:
    """Context manager: inside the `__torch_dispatch__` of a mode, dispatch operators as outside of it (2.11, 2.13).

    A mode leaves the mode stack while it handles a call, but the thread's dispatch keys still include it. So if no other
    mode is on the stack, these keys are excluded.
    """
    keys = (torch._C.DispatchKey.Python, torch._C.DispatchKey.PythonTLSSnapshot)
    with enable_reentrant_dispatch():
        if not torch._C._len_torch_dispatch_stack():
            for key in keys:
                torch._C._dispatch_tls_set_dispatch_key_included(key, False)
        yield


def no_modes() -> Any:
    """Return a context in which operators bypass the active dispatch modes, such as a FakeTensorMode (2.11, 2.13)."""
    return torch.utils._python_dispatch._disable_current_modes()


@contextmanager
def no_function_modes() -> Iterator[None]:
    """Context manager: no `TorchFunctionMode` is active. An active one sees each access to a tensor's shape (2.11, 2.13)."""
    with ExitStack() as restored:
        for _ in range(torch._C._len_torch_function_stack()):
            restored.enter_context(torch.overrides._pop_mode_temporarily())
        yield


@contextmanager
def no_saved_tensor_hooks() -> Iterator[None]:
    """Context manager: saved-tensor hooks are ignored, and autograd saves the tensors themselves (2.11, 2.13)."""
    was_tracing = torch._C._autograd._saved_tensors_hooks_set_tracing(True)
    try:
        yield
    finally:
        torch._C._autograd._saved_tensors_hooks_set_tracing(was_tracing)


def register_logger(name: str) -> None:
    """Make `torch._logging.set_logs(name=...)` accept a logger; `TORCH_LOGS="+name"` needs no registration (2.11, 2.13)."""
    from torch._logging._internal import log_registry

    if name not in log_registry.log_alias_to_log_qnames:
        log_registry.register_log(name, name)


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Write a text to `TORCH_TRACE` for tlparse; `text` is called only if that is set (2.11, 2.13)."""
    from torch._logging._internal import trace_structured

    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text)


@contextmanager
def reset_tracing_on_error() -> Iterator[None]:
    """Context manager: if the block raises, restore torch's TracingContext, so that the graph can be traced again.

    Errors are not suppressed (2.11, 2.13).
    """
    context = torch._guards.TracingContext.try_get()
    saved_state = {} if context is None else dict(vars(context))
    try:
        yield
    except BaseException:
        if context is not None:
            vars(context).update(saved_state)
        raise


class NoMaskForCudnn(torch.overrides.TorchFunctionMode):
    """Trace `scaled_dot_product_attention` with a mask to an operator other than cuDNN's.

    For hidden keys of a boolean mask, torch 2.11 passes -65504 to cuDNN (pytorch#177842), from which no pass can prove that
    a key is hidden; the other operators get minus infinity. This changes only the traced graph: streamfx chooses its kernels
    itself. If not all kernels are enabled, the user's choice stays (2.11, 2.13).
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch function. During attention with a mask, disable cuDNN if all kernels are enabled."""
        keywords = kwargs or {}
        mask = args[3] if len(args) > 3 else keywords.get("attn_mask")
        if func is not torch.nn.functional.scaled_dot_product_attention or mask is None:
            return func(*args, **keywords)
        flags = torch.backends.cuda
        if not (flags.cudnn_sdp_enabled() and flags.flash_sdp_enabled() and flags.mem_efficient_sdp_enabled()):
            return func(*args, **keywords)
        flags.enable_cudnn_sdp(False)
        try:
            return func(*args, **keywords)
        finally:
            flags.enable_cudnn_sdp(True)


def in_trace_context(function: Callable[[], T]) -> Callable[[], T]:
    """Wrap a function so that each later call runs in torch's TracingContext that is active now, or in none (2.11, 2.13)."""
    context = torch._guards.TracingContext.try_get()

    def run() -> T:
        """Run the function with the tracing context that was active when it was wrapped."""
        with torch._guards.tracing(context):
            return function()

    return run


# -- fake and real values


def real_values() -> Any:
    """Return a context in which real tensors have values, even inside a FakeTensorMode (2.11, 2.13)."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def fake_mode_of(values: Any) -> Any:
    """Return the FakeTensorMode that is active, or to which values in this tree belong; None without such a mode (2.11, 2.13)."""
    return torch._guards.detect_fake_mode(values)


def fake_copies(mode: Any) -> Any:
    """Return a context in which `copy.deepcopy` creates fake copies of tensors (2.11, 2.13)."""
    from torch._subclasses.fake_tensor import FakeCopyMode

    return FakeCopyMode(mode)
