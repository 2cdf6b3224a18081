"""The flash-attn package's operators as the one operator for all devices' attention.

They take heads as [b m h d], align a causal mask and a window at the last row and key, and the backward writes into gradients
that it is given (flash_attn/flash_attn_interface.py, 2.7 and 2.8). Both halves change together, or neither.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from streamfx.ir.joint import bound_arguments, shape_of_node
from streamfx.ir.writer import GraphWriter, size_arguments
from streamfx.passes.canonicalization.equation import equation, results_in_use
from streamfx.runtime.kernels import ATTENTION, ATTENTION_BACKWARD, KERNELS
from streamfx.torch_private import AUTO_FUNCTIONALIZED, OpOverload

aten = torch.ops.aten

FORWARD, BACKWARD = "flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_backward"
HOW = ("dropout_p", "softmax_scale", "causal", "window_size_left", "window_size_right", "softcap", "alibi_slopes")
GRADIENTS = ("dq", "dk", "dv")
READ = ("dout", "q", "k", "v", "out", "softmax_lse", "rng_state", "deterministic", *HOW)
WRITTEN = {"_all_bases", *(f"_{name}_base_index" for name in GRADIENTS)}  # as functionalization names what is written
OUT, LSE, STATE = 0, 1, 3  # results


@equation(FORWARD)
def attention_of_the_flash_package(node: fx.Node, writer: GraphWriter) -> dict[fx.Node, fx.Node] | None:
    """flash(q [b m h d], k, v, causal=True) -> out, lse           ->   attention(q [b h m d], k, v, is_causal=True) -> out, lse
    flash_backward(d, q, k, v, out, lse, dq=empty, dk, dv)   ->   attention_backward(d, q, k, v, out, lse, is_causal=True)

    Without dropout, softcap and slopes; as many keys as rows, where not all are seen. A window becomes a mask.
    """
    arguments, parts = bound_arguments(node), results_in_use(node)
    backwards = None if parts is None else _backwards(arguments, parts)
    if parts is None or backwards is None or not _is_plain(arguments):
        return None
    heads = [_turned(arguments[name], writer) for name in ("q", "k", "v")]
    options = _options(arguments, writer)
    made = writer.call(ATTENTION, *heads, **options)
    out, lse = (writer.call(operator.getitem, made, i) for i in range(2))
    found = dict.fromkeys(parts.get(LSE, ()), lse)
    found |= dict.fromkeys(parts.get(OUT, ()), _turned(out, writer))
    for other in backwards:
        writer.before(other)
        gradient = _turned(other.kwargs["dout"], writer)
        made = writer.call(ATTENTION_BACKWARD, gradient, *heads, out, lse, **options)
        for position, users in (results_in_use(other) or {}).items():
            turned = _turned(writer.call(operator.getitem, made, position - 1), writer)
            found |= dict.fromkeys(users, turned)
    return found


def _is_plain(arguments: Mapping[str, Any]) -> bool:
    rows, keys = (shape_of_node(arguments[name])[1] for name in ("q", "k"))
    sees_all = not arguments["causal"] and arguments["window_size_left"] < 0 and arguments["window_size_right"] < 0
    return (
        arguments["q"].meta["val"].device.type in KERNELS
        and arguments["dropout_p"] == arguments["softcap"] == 0.0
        and arguments["alibi_slopes"] is None
        and not arguments["return_softmax"]
        and (sees_all or rows == keys)
    )


def _backwards(arguments: Mapping[str, Any], parts: Mapping[int, Sequence[fx.Node]]) -> list[fx.Node] | None:
    """The backward calls; None where results go anywhere else than one of theirs may."""
    inner = {user for position, group in parts.items() if position != OUT for part in group for user in part.users}
    if any(not _is_backward_of(user, arguments, parts) for user in inner) or set(parts) - {OUT, LSE, STATE}:
        return None
    return sorted(inner)


def _is_backward_of(node: fx.Node, forward: Mapping[str, Any], parts: Mapping[int, Sequence[fx.Node]]) -> bool:
    if node.target is not AUTO_FUNCTIONALIZED or not isinstance(node.args[0], OpOverload) or node.args[0].name() != BACKWARD:
        return False
    own = node.kwargs
    if not set(own) <= {*READ, *WRITTEN} or any(own[f"_{name}_base_index"] != i for i, name in enumerate(GRADIENTS)):
        return False
    same = all(own[name] == forward[name] for name in ("q", "k", "v", *HOW))
    linked = own["out"] in parts.get(OUT, ()) and own["softmax_lse"] in parts.get(LSE, ())
    results = results_in_use(node)
    is_known = own["rng_state"] in (None, *parts.get(STATE, ())) and results is not None and set(results) <= {1, 2, 3}
    return same and linked and is_known


def _options(arguments: Mapping[str, Any], writer: GraphWriter) -> dict[str, Any]:
    scale = {"scale": arguments["softmax_scale"]}
    left, right = arguments["window_size_left"], 0 if arguments["causal"] else arguments["window_size_right"]
    if left < 0 and right <= 0:
        return scale if right < 0 else {"is_causal": True, **scale}
    return {"attn_mask": _mask(left, right, arguments, writer), **scale}


def _mask(left: int, right: int, arguments: Mapping[str, Any], writer: GraphWriter) -> fx.Node:
    """Zero for keys of the window, minus infinity for others: [1 1 m n]."""
    query, call = arguments["q"], writer.call
    like = {"dtype": query.meta["val"].dtype, "device": query.meta["val"].device}
    size = size_arguments(query, writer)[1]
    rows, keys = (call(aten.arange.default, size, device=like["device"]) for _ in range(2))
    delta = call(
        aten.sub.Tensor, call(aten.reshape.default, keys, [1, 1, 1, size]), call(aten.reshape.default, rows, [1, 1, size, 1])
    )
    shown, hidden = (call(aten.full.default, [], number, **like) for number in (0.0, -math.inf))
    bounds = [(aten.le.Scalar, right)] if right >= 0 else []
    bounds += [(aten.ge.Scalar, -left)] if left >= 0 else []
    mask = shown
    for compare, bound in bounds:
        mask = call(aten.where.self, call(compare, delta, bound), mask, hidden)
    return mask


def _turned(heads: Any, writer: GraphWriter) -> fx.Node:
    """[b m h d] as [b h m d], and back."""
    return writer.call(aten.transpose.int, heads, 1, 2)
