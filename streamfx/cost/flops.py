"""Floating-point operations of an operator, from the shapes of its arguments."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from streamfx.ir.span import Span
from streamfx.node_meta import VALUE
from streamfx.torch_private import OpOverload, real_values
from streamfx.torch_private.symbolic_sizes import size_hint

PACKED = ("bitsandbytes::gemm_4bit", "quanto::qbytes_mm")  # products x @ w.T with a packed weight, by the names of other packages


def flops_of(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Return the FLOPs of a call: of products, convolutions, and fused attention; other operators count as 0.

    Fused attention counts the query-key pairs that its own causal flag leaves visible.
    """
    if not isinstance(target, OpOverload):
        return 0
    if is_fused_attention(target):
        arguments = arguments_by_name(target, args, kwargs)
        return attention_flops(target, arguments, _visible_span(target, arguments))
    if target.name() in PACKED:
        return 2 * int(args[0].numel()) * int(out.shape[-1])
    if target is torch.ops.aten.convolution_backward.default:
        return convolution_backward_flops(*args, **kwargs)
    formula = flop_registry.get(target.overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


def convolution_backward_flops(
    grad: Any, x: Any, weight: Any, bias_sizes: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, *rest: Any
) -> int:
    """Count the forward FLOPs once per requested gradient of x and weight; PyTorch counts one group's weight gradient only."""
    output_mask = rest[-1]
    positions = (x if transposed else grad).shape[2:]
    return 2 * int(x.shape[0]) * math.prod(map(int, positions)) * int(weight.numel()) * sum(output_mask[:2])


def flops_of_graph(graph: fx.Graph) -> int:
    """Return the FLOPs of a traced graph that runs once, at the sizes of the trace."""
    counted = (node for node in graph.nodes if node.op == "call_function" and has_flops(node.target))
    return sum(flops_of_call(node.target, node.args, node.kwargs, node) for node in counted)


def flops_of_call(target: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the FLOPs of a traced call; its arguments and its result may be nodes."""
    with real_values():  # only shapes are read; fake tensors would take several times as long to create
        return flops_of(target, _with_meta_tensors(args), _with_meta_tensors(kwargs), _with_meta_tensors(out))


def has_flops(target: Any) -> bool:
    """Return whether the FLOPs of an operator are counted."""
    if not isinstance(target, OpOverload):
        return False
    return is_fused_attention(target) or target.name() in PACKED or target.overloadpacket in flop_registry


def _with_meta_tensors(arguments: Any) -> Any:
    """Replace nodes with meta tensors, or with the numbers they hold."""

    def meta_value(node: fx.Node) -> Any:
        """Return a meta tensor of a node's shape, or the number that the node holds."""
        value = node.meta.get(VALUE)
        if isinstance(value, torch.Tensor):
            return torch.empty([size_hint(size) for size in value.shape], dtype=value.dtype, device="meta")
        return size_hint(value) if isinstance(value, torch.SymInt) else value

    return fx.node.map_arg(arguments, meta_value)


def is_fused_attention(target: Any) -> bool:
    """Return whether an operator is attention over queries [b h m d], keys [b g n d], and values [b g n e]."""
    names = ("aten::_scaled_dot_product", "streamfx::attention")
    return isinstance(target, OpOverload) and target.name().startswith(names)


def _visible_span(target: Any, arguments: Mapping[str, Any]) -> Span:
    """Return the span that the operator's own flag or window leaves visible.

    CUDA's flash attention aligns its causal mask at the last row and the last key.
    """
    extra_keys = size_hint(arguments["key"].shape[2]) - size_hint(arguments["query"].shape[2])
    if "left" in arguments:
        return Span(extra_keys - arguments["left"], extra_keys)
    if not arguments.get("is_causal"):
        return Span()
    aligns_at_end = target.name().startswith("aten::_scaled_dot_product_flash_attention") and "for_cpu" not in target.name()
    return Span(high=extra_keys if aligns_at_end else 0)


def attention_flops(target: Any, arguments: Mapping[str, Any], span: Span) -> int:
    """Count two products per visible query-key pair in the forward, and five in the backward."""
    query, key, value = (arguments[name].shape for name in ("query", "key", "value"))
    pairs = visible_pairs(size_hint(query[2]), size_hint(key[2]), span)
    width, value_width = size_hint(query[3]), size_hint(value[3])
    is_backward = target._schema.arguments[0].name.startswith("grad_out")
    per_pair = 3 * width + 2 * value_width if is_backward else width + value_width
    return 2 * size_hint(query[0]) * size_hint(query[1]) * pairs * per_pair


def visible_pairs(rows: int, keys: int, span: Span) -> int:
    """Count the pairs in which row i sees key j: i + low <= j <= i + high, aligned at the first row and the first key.

    >>> visible_pairs(4, 4, Span(high=0)), visible_pairs(4, 4, Span(-1, 0)), visible_pairs(2, 8, Span())
    (10, 7, 16)
    """
    pairs = rows * keys if span.high is None else _pairs_below(rows, keys, span.high + 1)
    return pairs if span.low is None else pairs - _pairs_below(rows, keys, span.low)


def _pairs_below(rows: int, keys: int, bound: int) -> int:
    """Return the number of pairs in which row i sees key j, for j < i + bound."""
    partial_rows = range(max(0, 1 - bound), min(rows, keys - bound))  # rows that see some keys, but not all
    partial_pairs = len(partial_rows) * (2 * bound + partial_rows[0] + partial_rows[-1]) // 2 if partial_rows else 0
    return partial_pairs + keys * max(0, rows - max(0, keys - bound))


def arguments_by_name(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operator call by their names in its schema."""
    names = [argument.name for argument in target._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}
