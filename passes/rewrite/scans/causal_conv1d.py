"""Replace the causal-conv1d package's operators by a recurrence whose state is the last rows of the previous chunk.

The package's C++ operators write into tensors that their caller passes, and add to the gradients of weights
(cpp_functions.py in version 1.6). In a graph a call is `auto_functionalized(operator, x=..., _out_base_index=0,
_all_bases=[out])`. `NotStatefulError` says why a call cannot be replaced; the rule then records this reason and does not
apply.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from streamfx.ir.scan_schema import NotStatefulError, Stateful
from streamfx.ir.writer import GraphWriter
from streamfx.kernels import causal_conv
from streamfx.node_meta import FALLBACK_REASON, VALUE
from streamfx.passes.ops.constants import is_zero
from streamfx.passes.rewrite.pattern import getitems_by_index, rewrite_rule
from streamfx.passes.rewrite.scans.custom_scan import (
    UNPACKED_RESULTS,
    ScanCall,
    emit_recurrences,
    strip_aliases,
    users_through_aliases,
)
from streamfx.torch_private import AUTO_FUNCTIONALIZED, OpOverload

FORWARD, BACKWARD = "DaoAILab::_causal_conv1d_fwd_cpp", "DaoAILab::_causal_conv1d_bwd_cpp"
INPUTS = ("x", "weight", "bias")
UNSUPPORTED = ("seq_idx", "initial_states")
WRITTEN_BASES = ("dx", "dweight", "dbias")  # in the order of `_all_bases`
CONVOLUTION = Stateful(
    name="causal_conv1d",
    operators=(FORWARD, BACKWARD),
    forward=causal_conv.forward,
    backward=causal_conv.backward,
    argument_names=("x", "weight", "bias", "silu", "first"),
    backward_argument_names=("dy", "dlast", "x", "weight", "bias", "silu", "first"),
    rows={"x": 2},
    results=(2, None),
    states={"first": 1},
    cotangents={"dy": 0, "dlast": 1},
    gradients=("x", "weight", "bias", "first"),
)


@rewrite_rule(AUTO_FUNCTIONALIZED)
def causal_conv1d_to_recurrence(node: fx.Node, writer: GraphWriter) -> Mapping[fx.Node, fx.Node] | None:
    """causal_conv1d(x, weight, out=empty) -> out         ->   recurrence(x, weight) -> out
    causal_conv1d_backward(d, x, weight, dx=empty, dweight=0) -> dx, dweight   ->   recurrence(d, x, weight) -> dx, dweight

    Applies if the caller passes no states and no sequence indices.
    """
    if _functionalized_name(node) != FORWARD:
        return None
    try:
        call = _read_forward(node)
        users = {user for user in users_through_aliases(call.arguments["x"]) if _functionalized_name(user) == BACKWARD}
        backwards = [backward for user in sorted(users) if (backward := _read_backward(user, call)) is not None]
        return emit_recurrences(CONVOLUTION, call, backwards, writer)
    except NotStatefulError as why:
        node.meta[FALLBACK_REASON] = f"{FORWARD} with {why}"
        return None


def _functionalized_name(node: fx.Node) -> str:
    """Return the name of the operator that an `auto_functionalized` node calls; the empty string for any other node."""
    target = node.args[0] if node.target is AUTO_FUNCTIONALIZED else None
    return target.name() if isinstance(target, OpOverload) else ""


def _read_forward(node: fx.Node) -> ScanCall:
    """Return a forward call with the argument names of `CONVOLUTION`; `first`, the state before row 0, is None (zeros).

    Raise a NotStatefulError if the caller passes states or sequence indices.
    """
    arguments = node.kwargs
    _check_none(arguments, (*UNSUPPORTED, "_final_states_out_base_index"))
    return _scan_call(node, {**{name: arguments[name] for name in INPUTS}, "silu": arguments["silu_activation"], "first": None})


def _read_backward(node: fx.Node, call: ScanCall) -> ScanCall | None:
    """Return a backward call with the argument names of `CONVOLUTION`; None if it is the backward of another forward call.

    Raise a NotStatefulError if the caller passes states or sequence indices, or gradient buffers other than dx that may
    hold anything but zeros: the operator adds to them.
    """
    arguments = node.kwargs
    forward_arguments = {
        **{name: strip_aliases(arguments[name]) for name in INPUTS},
        "silu": arguments["silu_activation"],
        "first": None,
    }
    if any(value is not call.arguments[name] for name, value in forward_arguments.items()):
        return None
    _check_none(arguments, (*UNSUPPORTED, "_dfinal_states_base_index", "_dinitial_states_base_index"))
    bases: Sequence[Any] = arguments["_all_bases"]  # type: ignore[assignment]
    num_bases = 2 if forward_arguments["bias"] is None else 3
    base_indices = [arguments[f"_{name}_base_index"] for name in WRITTEN_BASES[:num_bases]]
    if base_indices != [*range(num_bases)] or not all(map(is_zero, bases[1:])):
        raise NotStatefulError("gradients that are added to buffers other than zeros")
    return _scan_call(node, {**forward_arguments, "dy": arguments["dout"], "dlast": None})


def _scan_call(node: fx.Node, arguments: Mapping[str, Any]) -> ScanCall:
    """Return the call of an `auto_functionalized` node with these arguments, whose results are the tensors that it writes.

    The node returns None as result 0, then the tensors that it writes: so result i + 1 of the node is result i of the call.
    """
    getitems = getitems_by_index(node)
    if getitems is None or 0 in getitems:
        raise NotStatefulError(UNPACKED_RESULTS)
    return ScanCall(
        node,
        {name: strip_aliases(value) for name, value in arguments.items()},
        {i - 1: getitems[i] for i in getitems},
        node.meta[VALUE][1:],
    )


def _check_none(arguments: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise a NotStatefulError if any of the arguments with these names is not None."""
    for name in names:
        if arguments.get(name) is not None:
            raise NotStatefulError(f"{name.strip('_').removesuffix('_base_index')} passed by the caller")
