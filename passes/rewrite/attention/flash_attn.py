"""Replace the flash-attn package's operators by the attention operator of all devices.

The package's heads are [b m h d], or [m h d] for packed sequences. Its causal mask and window are aligned at the last row
and key, and its backward writes into gradient buffers of the caller (flash_attn/flash_attn_interface.py, 2.7 and 2.8). Forward
and backward are replaced together or not at all. Builds of a kernel from the hub define the same operators under other
names (`passes/ops/hub_kernels.py`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from streamfx.dialect.attention import ATTENTION, ATTENTION_BACKWARD
from streamfx.ir.joint import bound_arguments, shape_of_node
from streamfx.ir.writer import GraphWriter, size_arguments
from streamfx.kernels.sdpa import KERNELS
from streamfx.node_meta import FALLBACK_REASON, VALUE
from streamfx.passes.ops.hub_kernels import operator_name
from streamfx.passes.rewrite.attention.varlen_mask import WindowSize, emit_document_bias, emit_window_bias
from streamfx.passes.rewrite.pattern import getitems_by_index, readers_of, rewrite_rule
from streamfx.torch_private import AUTO_FUNCTIONALIZED

aten = torch.ops.aten

OPTIONS = ("dropout_p", "softmax_scale", "causal", "window_size_left", "window_size_right", "softcap", "alibi_slopes")
ENDS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
GRADIENTS = ("dq", "dk", "dv")
BACKWARD_OPERANDS = ("dout", "q", "k", "v", "out", "softmax_lse", "rng_state", "deterministic", *OPTIONS)
BACKWARD_BASES = {"_all_bases", *(f"_{name}_base_index" for name in GRADIENTS)}  # named by functionalization
OUT, LSE, STATE = 0, 1, 3  # indices of results of the forward operator
GRADIENT_RESULTS = {1, 2, 3}  # indices of dq, dk and dv in the results of the functionalized backward operator

# Arguments that no kernel of streamfx supports, with the values that disable them.
UNSUPPORTED: dict[str, Any] = {
    "dropout_p": 0.0,
    "softcap": 0.0,
    "alibi_slopes": None,
    "return_softmax": False,
    "block_table": None,
    "leftpad_k": None,
    "seqused_k": None,
    "zero_tensors": False,
}
UNSUPPORTED_CALL = "{operator} with {found}: streamfx has no such kernel; flex_attention or unfused attention streams instead"


@dataclass(frozen=True)
class PackageLayout:
    """One of the package's two layouts of heads, dense [b m h d] or packed [m h d], and how to convert calls in it."""

    backward: str  # the name of the backward operator
    extra_arguments: tuple[str, ...]  # arguments that only this layout has
    row_dim: int  # the dimension of query positions (m)
    to_bhmd: Callable[[Any, GraphWriter], fx.Node]  # permutes heads to [b h m d]
    from_bhmd: Callable[[Any, GraphWriter], fx.Node]  # permutes heads from [b h m d] to the layout
    lse_from_bhm: Callable[[Any, GraphWriter], fx.Node]  # converts the log-sum-exp [b h m] to the package's shape
    attention_options: Callable[[Mapping[str, Any], GraphWriter], dict[str, Any]]  # arguments of a call -> mask and scale


@rewrite_rule("flash_attn::_flash_attn_forward")
def flash_attn_to_attention(node: fx.Node, writer: GraphWriter) -> dict[fx.Node, fx.Node] | None:
    """flash(q [b m h d], k, v, causal=True) -> out, lse           ->   attention(q [b h m d], k, v, is_causal=True) -> out, lse
    flash_backward(dout, q, k, v, out, lse, dq=empty, dk, dv)   ->   attention_backward(dout, q, k, v, out, lse, is_causal=True)

    Applies without dropout, softcap and slopes. A causal mask or a window needs as many keys as queries: the package aligns
    masks at the last query and key, streamfx at the first. A window becomes a mask. The reason for any other call is
    recorded at its node (`FALLBACK_REASON`).
    """
    return _replace_calls(node, DENSE, writer)


@rewrite_rule("flash_attn::_flash_attn_varlen_forward")
def flash_attn_varlen_to_attention(node: fx.Node, writer: GraphWriter) -> dict[fx.Node, fx.Node] | None:
    """flash_varlen(q [m h d], k, v, ends, ends, causal=True) -> out, lse   ->   attention(q [1 h m d], k, v, mask of documents)

    The index of row m's document is the number of ends that are at most m. The package leaves rows without a document
    unwritten, so any value is valid there. The maximum length in a call does not affect the result.
    """
    return _replace_calls(node, PACKED, writer)


def _replace_calls(node: fx.Node, layout: PackageLayout, writer: GraphWriter) -> dict[fx.Node, fx.Node] | None:
    """Emit attention for a forward call `node` and its backward calls, and map the old results to the new.

    If an option is not supported, or if anything but its own backward uses the call's log-sum-exp, return None and record
    the reason at the node (`FALLBACK_REASON`).
    """
    arguments, forward_results = bound_arguments(node), getitems_by_index(node)
    unsupported = _find_unsupported(arguments, layout)
    if unsupported:
        node.meta[FALLBACK_REASON] = UNSUPPORTED_CALL.format(operator=node.target, found=unsupported)
        return None
    backwards = None if forward_results is None else _find_backward_calls(arguments, forward_results, layout)
    if forward_results is None or backwards is None:
        found = "results in use by more than its own backward"
        node.meta[FALLBACK_REASON] = UNSUPPORTED_CALL.format(operator=node.target, found=found)
        return None
    heads = [layout.to_bhmd(arguments[name], writer) for name in ("q", "k", "v")]
    options = layout.attention_options(arguments, writer)
    results = writer.call(ATTENTION, *heads, **options)
    out, lse = (writer.call(operator.getitem, results, i) for i in range(2))
    replacements = dict.fromkeys(forward_results.get(LSE, ()), layout.lse_from_bhm(lse, writer))
    replacements |= dict.fromkeys(forward_results.get(OUT, ()), layout.from_bhmd(out, writer))
    for backward in backwards:
        writer.move_before(backward)
        gradient = layout.to_bhmd(backward.kwargs["dout"], writer)
        results = writer.call(ATTENTION_BACKWARD, gradient, *heads, out, lse, **options)
        for result_index, getitems in (getitems_by_index(backward) or {}).items():  # 1, 2, 3: dq, dk, dv
            new_gradient = layout.from_bhmd(writer.call(operator.getitem, results, result_index - 1), writer)
            replacements |= dict.fromkeys(getitems, new_gradient)
    return replacements


def _find_unsupported(arguments: Mapping[str, Any], layout: PackageLayout) -> str:
    """Return the first option of a call that streamfx's kernels do not support, as a text such as "softcap=30.0".

    Return the empty string if they support the call. They align a mask at the first query and key, the package at the last;
    both agree if there are as many keys as queries, or if no key is hidden.
    """
    for name, disabled in UNSUPPORTED.items():
        if arguments.get(name, disabled) != disabled:
            return f"{name}={arguments[name]}"
    num_queries, num_keys = (shape_of_node(arguments[name])[layout.row_dim] for name in ("q", "k"))
    sees_all = not arguments["causal"] and arguments["window_size_left"] < 0 and arguments["window_size_right"] < 0
    if num_queries != num_keys and not (sees_all and layout is DENSE):
        return "different numbers of queries and keys, and a mask that aligns the last ones"
    device = arguments["q"].meta[VALUE].device.type
    return "" if device in KERNELS else f"tensors on {device}"


def _find_backward_calls(
    arguments: Mapping[str, Any], forward_results: Mapping[int, Sequence[fx.Node]], layout: PackageLayout
) -> list[fx.Node] | None:
    """Return the backward calls of a forward call; None if any other node uses its results, except `out`.

    `arguments` are the arguments of the forward call by name; `forward_results` holds its `getitem` nodes by result index.
    """
    if not set(forward_results) <= {OUT, LSE, STATE}:
        return None
    readers = readers_of(forward_results)
    return readers if all(_is_backward_of(user, arguments, forward_results, layout) for user in readers) else None


def _is_backward_of(
    node: fx.Node, forward_arguments: Mapping[str, Any], forward_results: Mapping[int, Sequence[fx.Node]], layout: PackageLayout
) -> bool:
    """Return whether a node is the backward of the forward call with these arguments.

    A backward writes into buffers, so functionalization has wrapped it: its operands are keyword arguments, and the
    buffers of dq, dk and dv are its bases 0, 1 and 2. It must have the forward's operands and options, and read its `out`,
    its log-sum-exp and its random state (or None); only its results dq, dk and dv may be used.
    """
    if node.target is not AUTO_FUNCTIONALIZED or operator_name(node.args[0]) != layout.backward:
        return False
    arguments = node.kwargs
    supported = {*BACKWARD_OPERANDS, *BACKWARD_BASES, *layout.extra_arguments, "zero_tensors"}
    if (
        not set(arguments) <= supported
        or arguments.get("zero_tensors")
        or any(arguments[f"_{name}_base_index"] != i for i, name in enumerate(GRADIENTS))
    ):
        return False
    compared = ("q", "k", "v", *OPTIONS, *layout.extra_arguments)
    has_equal_operands = all(arguments[name] == forward_arguments[name] for name in compared)
    reads_results = arguments["out"] in forward_results.get(OUT, ()) and arguments["softmax_lse"] in forward_results.get(LSE, ())
    results = getitems_by_index(node)
    reads_known_state = arguments["rng_state"] in (None, *forward_results.get(STATE, ()))
    returns_only_gradients = results is not None and set(results) <= GRADIENT_RESULTS
    return has_equal_operands and reads_results and reads_known_state and returns_only_gradients


# -- dense: [b m h d]


def _emit_transpose(heads: Any, writer: GraphWriter) -> fx.Node:
    """Swap the dimensions of rows and heads: [b m h d] -> [b h m d], or back."""
    return writer.call(aten.transpose.int, heads, 1, 2)


def _identity(value: fx.Node, _: GraphWriter) -> fx.Node:
    """Return the value itself: the log-sum-exp of the dense layout needs no conversion."""
    return value


def _window_size(arguments: Mapping[str, Any]) -> WindowSize:
    """Return from the call's options how many keys before and after its own position a row sees (-1: all)."""
    return arguments["window_size_left"], 0 if arguments["causal"] else arguments["window_size_right"]


def _dense_options(arguments: Mapping[str, Any], writer: GraphWriter) -> dict[str, Any]:
    """Return the keyword arguments of `streamfx::attention` for a dense call: the scale, and how keys are hidden.

    No window: nothing else. A causal call without a left bound: the causal flag. Any other window: a bias [1 1 m n].
    """
    scale = {"scale": arguments["softmax_scale"]}
    left, right = _window_size(arguments)
    if left < 0 and right <= 0:
        return scale if right < 0 else {"is_causal": True, **scale}
    _, num_queries, *_ = size_arguments(arguments["q"], writer)
    return {"attn_mask": emit_window_bias(arguments["q"], num_queries, (left, right), writer), **scale}


DENSE = PackageLayout(
    backward="flash_attn::_flash_attn_backward",
    extra_arguments=(),
    row_dim=1,
    to_bhmd=_emit_transpose,
    from_bhmd=_emit_transpose,
    lse_from_bhm=_identity,
    attention_options=_dense_options,
)


# -- packed: [m h d]


def _emit_with_batch(heads: Any, writer: GraphWriter) -> fx.Node:
    """Permute heads [m h d] to [1 h m d]."""
    return writer.call(aten.transpose.int, writer.call(aten.unsqueeze.default, heads, 0), 1, 2)


def _emit_without_batch(heads: Any, writer: GraphWriter) -> fx.Node:
    """Permute heads [1 h m d] to [m h d]."""
    return _emit_squeezed_batch(writer.call(aten.transpose.int, heads, 1, 2), writer)


def _emit_squeezed_batch(value: Any, writer: GraphWriter) -> fx.Node:
    """Remove the leading dimension of size one."""
    return writer.call(aten.squeeze.dim, value, 0)


def _packed_options(arguments: Mapping[str, Any], writer: GraphWriter) -> dict[str, Any]:
    """Return the keyword arguments of `streamfx::attention` for a packed call: the scale, and a bias [1 1 m n].

    The bias hides keys of other documents and keys outside the window.
    """
    num_queries, *_ = size_arguments(arguments["q"], writer)
    ends = arguments["cu_seqlens_q"], arguments["cu_seqlens_k"]
    mask = emit_document_bias(arguments["q"], num_queries, _window_size(arguments), ends, writer)
    return {"attn_mask": mask, "scale": arguments["softmax_scale"]}


PACKED = PackageLayout(
    backward="flash_attn::_flash_attn_varlen_backward",
    extra_arguments=ENDS,
    row_dim=0,
    to_bhmd=_emit_with_batch,
    from_bhmd=_emit_without_batch,
    lse_from_bhm=_emit_squeezed_batch,
    attention_options=_packed_options,
)
