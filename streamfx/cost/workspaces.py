"""Workspaces of CUDA kernels: temporary memory in addition to their results, and how the allocator rounds sizes.

Sources are under aten/src/ATen/native/transformers/cuda of PyTorch 2.13. The workspace of our own operators is the memory
they allocate before their result. For an operator that calls others, the meter traces these calls (`meter.py`), with
their workspaces and the copies of their inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from streamfx.cost.flops import arguments_by_name
from streamfx.dialect.attention import ATTENTION_WINDOW, ATTENTION_WINDOW_BACKWARD
from streamfx.dialect.products import ADD_ARRANGED_OUTER, ARRANGED_MM
from streamfx.kernels import cuda_attention, flash_varlen, grouped_mm, sdpa
from streamfx.kernels.attention_call import AttentionCall
from streamfx.kernels.device_kinds import device_kind
from streamfx.torch_private import OpOverload

aten = torch.ops.aten
ALLOCATION_BLOCK = 512  # bytes: c10/cuda/CUDACachingAllocator.cpp: kMinBlockSize
BYTES_PER_FLOAT32 = 4
Arguments = Mapping[str, Any]


def allocation_size(size: int, device: torch.device) -> int:
    """Return the device memory that an allocation of `size` bytes occupies."""
    return size if device_kind(device).type == "cpu" else -(-size // ALLOCATION_BLOCK) * ALLOCATION_BLOCK


def workspace_of(target: Any, args: Any, kwargs: Any) -> int:
    """Return the workspace bytes of an operator; 0 on the CPU, where they depend on the number of threads."""
    formula = WORKSPACES.get(target) if isinstance(target, OpOverload) else None
    if formula is None:
        return 0
    arguments = arguments_by_name(target, args, kwargs)
    first_tensor: Tensor = next(value for value in arguments.values() if isinstance(value, Tensor))
    return 0 if device_kind(first_tensor.device).type == "cpu" else formula(arguments)


def _flash_backward(arguments: Arguments) -> int:
    """Return the bytes of softmax_d, dq_accum, dk_expanded, and dv_expanded (flash_attn/flash_api.cpp: mha_bwd)."""
    batch, heads, rows, width = arguments["query"].shape
    groups, keys = arguments["key"].shape[1:3]
    rows, padded = _round_up(rows, 128), _round_up(width, 32 if width <= 128 else 64)
    expanded = 2 * batch * keys * heads * width * arguments["query"].element_size() if groups != heads else 0
    return batch * heads * rows * (1 + padded) * BYTES_PER_FLOAT32 + expanded


def _cudnn_backward(arguments: Arguments) -> int:
    """Return the bytes of softmax_sum, dQ_accum, dK_fullhead, and dV_fullhead.

    cudnn-frontend: node/scaled_dot_product_flash_attention.h.
    """
    batch, heads, rows, width = arguments["query"].shape
    groups, keys, value_width = arguments["value"].shape[1:]
    expanded = batch * keys * heads * (width + value_width) * arguments["query"].element_size() if groups != heads else 0
    return batch * heads * rows * (1 + width) * BYTES_PER_FLOAT32 + expanded


def _no_workspace(arguments: Arguments) -> int:
    """Return 0: a kernel that allocates only its result on the device."""
    return 0


def _flash_rows_backward(arguments: Arguments) -> int:
    """Return the workspace of flash attention for [b m h d], or for packed documents [m h d], which are padded with rows."""
    operands = {name: arguments[name] for name in ("query", "key", "value")}
    if arguments["cum_seq_q"] is None:
        return _flash_backward({name: value.transpose(1, 2) for name, value in operands.items()})
    _, heads, width = operands["query"].shape
    padding_rows = flash_varlen.PADDING_ROWS * (len(arguments["cum_seq_q"]) - 1)
    unpadded = _flash_backward({name: value.transpose(0, 1)[None] for name, value in operands.items()})
    return unpadded + heads * padding_rows * (1 + _round_up(width, 32 if width <= 128 else 64)) * BYTES_PER_FLOAT32


def _efficient_rows_backward(arguments: Arguments) -> int:
    """Return the workspace of memory-efficient attention for [b m h d]."""
    return _efficient_backward({name: arguments[name].transpose(1, 2) for name in ("query", "key", "value")})


def _window_backward(arguments: Arguments) -> int:
    """Return the workspace of flash attention, or of the memory-efficient kernel, as `flash_window.py` chooses."""
    query, key, value = (arguments[operand] for operand in ("query", "key", "value"))
    is_flash = cuda_attention.flash_supports(AttentionCall(query, key, value, scale=arguments.get("scale")))
    return _flash_backward(arguments) if is_flash else _efficient_backward(arguments)


def _efficient_backward(arguments: Arguments) -> int:
    """Return the bytes of the float32 buffers of memory-efficient attention.

    `delta` (attention_backward.cu) has one element per query: the sum of out * gradient. Unless operands are float32, the
    kernel also accumulates the gradient of the queries in a buffer (kernel_backward.h: workspace_elements_gq), and for
    heads wider than 128 the gradients of keys and values (_gk, _gv), each padded to tiles of 64.
    """
    batch, heads, rows, width = arguments["query"].shape
    keys, value_width = arguments["value"].shape[2:]
    elements = rows
    if arguments["query"].dtype != torch.float32:
        elements += _round_up(rows, 64) * _round_up(width, 64)
        if max(width, value_width) > 128:  # kOutputInRF
            elements += _round_up(keys, 64) * (_round_up(width, 64) + _round_up(value_width, 64))
    return batch * heads * elements * BYTES_PER_FLOAT32


def _arranged_product(arguments: Arguments) -> int:
    """Return the bytes of rows sorted by group and of their products; 0 if a kernel reads the rows of each group by index."""
    x, weight = arguments["x"], arguments["weight"]
    if not grouped_mm.has_kernel(x, weight) and grouped_mm.multiplies_by_group(x, weight):
        return 0
    return x.nbytes + len(x) * weight.shape[2] * x.element_size()


def _added_outer(arguments: Arguments) -> int:
    """Return 0 if sums are added in place; else rows sorted by group, plus all groups' gradients if one call computes them."""
    total, x, y = arguments["total"], arguments["x"], arguments["y"]
    if grouped_mm.adds_by_group(total, x, y):
        return 0
    all_groups = total.numel() * x.element_size() if grouped_mm.has_kernel(x, y) else 0
    return x.nbytes + y.nbytes + all_groups


def _round_up(size: int, multiple: int) -> int:
    """Round a size up to a multiple."""
    return math.ceil(size / multiple) * multiple


WORKSPACES: dict[Any, Callable[[Arguments], int]] = {
    aten._scaled_dot_product_flash_attention.default: _no_workspace,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_cudnn_attention.default: _no_workspace,
    aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
    aten._scaled_dot_product_efficient_attention.default: _no_workspace,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    aten._flash_attention_forward.default: _no_workspace,
    aten._flash_attention_backward.default: _flash_rows_backward,
    aten._efficient_attention_forward.default: _no_workspace,
    aten._efficient_attention_backward.default: _efficient_rows_backward,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _no_workspace,  # a megabyte or two per thread (docs/planner.md)
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _no_workspace,
    ATTENTION_WINDOW: _no_workspace,
    ATTENTION_WINDOW_BACKWARD: _window_backward,
    ARRANGED_MM: _arranged_product,
    ADD_ARRANGED_OUTER: _added_outer,
}
TRACED_OPERATORS: dict[Any, Callable[..., Any]] = sdpa.OPERATOR_IMPLEMENTATIONS
