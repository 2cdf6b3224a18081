"""Replace the causal-conv1d package's operators by a recurrence whose state is the last rows of the previous chunk.

The package's C++ operators write into tensors that they are given, and add to the gradients of weights (cpp_functions.py
in version 1.6). In a graph this reads `auto_functionalized(operator, x=..., _out_base_index=0, _all_bases=[out])`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from streamfx.ir.scan_schema import NotStatefulError, Stateful
from streamfx.ir.writer import GraphWriter
from streamfx.kernels import causal_conv
from streamfx.node_meta import VALUE, WHY_WHOLE
from streamfx.passes.ops.constants import is_zero
from streamfx.passes.rewrite.pattern import equation, results_in_use
from streamfx.passes.rewrite.scans.custom_scan import TOGETHER, ScanCall, strip_aliases, users_through_aliases, written
from streamfx.torch_private import AUTO_FUNCTIONALIZED, OpOverload

FORWARD, BACKWARD = "DaoAILab::_causal_conv1d_fwd_cpp", "DaoAILab::_causal_conv1d_bwd_cpp"
GIVEN = ("x", "weight", "bias")
BEYOND = ("seq_idx", "initial_states")
WRITTEN = ("dx", "dweight", "dbias")  # in the order of `_all_bases`
CONVOLUTION = Stateful(
    name="causal_conv1d",
    operators=(FORWARD, BACKWARD),
    forward=causal_conv.forward,
    backward=causal_conv.backward,
    takes=("x", "weight", "bias", "silu", "first"),
    backward_takes=("dy", "dlast", "x", "weight", "bias", "silu", "first"),
    rows={"x": 2},
    results=(2, None),
    states={"first": 1},
    cotangents={"dy": 0, "dlast": 1},
    gradients=("x", "weight", "bias", "first"),
)


@equation(AUTO_FUNCTIONALIZED)
def convolution_of_the_package(node: fx.Node, writer: GraphWriter) -> Mapping[fx.Node, fx.Node] | None:
    """causal_conv1d(x, weight, out=empty) -> out         ->   recurrence(x, weight) -> out
    causal_conv1d_backward(d, x, weight, dx=empty, dweight=0) -> dx, dweight   ->   recurrence(d, x, weight) -> dx, dweight

    Applies if the caller passes no states and no sequence indices.
    """
    if _name(node) != FORWARD:
        return None
    try:
        call = _forward(node)
        users = {user for user in users_through_aliases(call.arguments["x"]) if _name(user) == BACKWARD}
        backwards = [other for user in sorted(users) if (other := _backward(user, call)) is not None]
        return written(CONVOLUTION, call, backwards, writer)
    except NotStatefulError as why:
        node.meta[WHY_WHOLE] = f"{FORWARD} with {why}"
        return None


def _name(node: fx.Node) -> str:
    target = node.args[0] if node.target is AUTO_FUNCTIONALIZED else None
    return target.name() if isinstance(target, OpOverload) else ""


def _forward(node: fx.Node) -> ScanCall:
    own = node.kwargs
    _check_none(own, (*BEYOND, "_final_states_out_base_index"))
    return _call(node, {**{name: own[name] for name in GIVEN}, "silu": own["silu_activation"], "first": None})


def _backward(node: fx.Node, call: ScanCall) -> ScanCall | None:
    """Return the backward if it belongs to this call, else None."""
    own = node.kwargs
    given = {**{name: strip_aliases(own[name]) for name in GIVEN}, "silu": own["silu_activation"], "first": None}
    if any(value is not call.arguments[name] for name, value in given.items()):
        return None
    _check_none(own, (*BEYOND, "_dfinal_states_base_index", "_dinitial_states_base_index"))
    bases: Sequence[Any] = own["_all_bases"]  # type: ignore[assignment]
    count = 2 if given["bias"] is None else 3
    if [own[f"_{name}_base_index"] for name in WRITTEN[:count]] != [*range(count)] or not all(map(is_zero, bases[1:])):
        raise NotStatefulError("gradients that are added to others")
    return _call(node, {**given, "dy": own["dout"], "dlast": None})


def _call(node: fx.Node, arguments: Mapping[str, Any]) -> ScanCall:
    """The results of `auto_functionalized` are the operator's own result (none here), followed by the tensors that it
    writes.
    """
    parts = results_in_use(node)
    if parts is None or 0 in parts:
        raise NotStatefulError(TOGETHER)
    kinds = node.meta[VALUE][1:]
    return ScanCall(
        node, {name: strip_aliases(value) for name, value in arguments.items()}, {i - 1: parts[i] for i in parts}, kinds
    )


def _check_none(own: Mapping[str, Any], names: Sequence[str]) -> None:
    for name in names:
        if own.get(name) is not None:
            raise NotStatefulError(f"{name.strip('_').removesuffix('_base_index')} of the caller's")
