"""The kernels of operators: those of fused attention, which differ in speed, and those that accumulate products in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from streamfx.dialect.products import ADD_ARRANGED_OUTER, ADD_PRODUCT
from streamfx.ir.operator_table import Kind, of_kind
from streamfx.kernels import cuda_attention, cuda_cudnn, grouped_mm
from streamfx.kernels.attention_call import AttentionCall
from streamfx.kernels.device_kinds import device_kind

CUDNN, FLASH = "cudnn", "flash"


def by_kernel(name: str, arguments: Mapping[str, Any], flops: int) -> dict[str, int]:
    """Return the FLOPs of a call by the field of `Work` for its kernel and pass; empty unless the kernel is cuDNN or flash."""
    kernel = kernel_of(name, arguments)
    return {f"{kernel}{'_backward' if 'backward' in name else ''}": flops} if kernel else {}


def kernel_of(name: str, arguments: Mapping[str, Any]) -> str:
    """Return "cudnn" or "flash", the kernel of an attention operator; "" for any other kernel.

    A CPU operator represents the kernel that PyTorch chooses on the device, if its mask is a flag there.
    """
    for kernel in (CUDNN, FLASH):
        if name.startswith(f"aten::_scaled_dot_product_{kernel}") and "for_cpu" not in name:
            return kernel
    query, key, value = (arguments[operand] for operand in ("query", "key", "value"))
    if device_kind(query.device).type != "cuda" or name.startswith("aten::_scaled_dot_product_efficient"):
        return ""
    if name.startswith("streamfx::") and arguments.get("attn_mask") is not None:
        return ""
    call = AttentionCall(query, key, value, scale=arguments.get("scale"))
    if "left" not in arguments and cuda_cudnn.supports_past_and_diagonal(call):
        return CUDNN
    return FLASH if cuda_attention.flash_supports(call) else ""


ACCUMULATING_OPERATORS = {*(item.overloadpacket.out for item in of_kind(Kind.ADDMM)), ADD_PRODUCT, ADD_ARRANGED_OUTER}


def find_total(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the total to which an operator adds a product; None for other operators, and if it overwrites the total."""
    is_first = func is ADD_PRODUCT and args[-1]
    return kwargs.get("out", args[0]) if func in ACCUMULATING_OPERATORS and not is_first else None


def bytes_of_total(func: Any, args: Sequence[Any], total: Tensor) -> int:
    """Return the bytes that an operator moves to add a product to its total: it reads and writes the total.

    A grouped product that adds group by group (by a Triton kernel, or by one product per group) moves only the groups that
    have rows: at most as many as there are rows. PyTorch's grouped kernel writes the sums of all groups to a temporary tensor
    first, whose bytes are added.
    """
    if func is not ADD_ARRANGED_OUTER:
        return 2 * total.nbytes
    _, x, y, order, ends = args
    if grouped_mm.has_kernel(x, y) and not grouped_mm.adds_by_group(total, x, y):
        addend_bytes = total.numel() * x.element_size()  # (below, 4 x: written; read and written by `masked_fill_`; added)
        return 2 * total.nbytes + 4 * addend_bytes
    num_groups = max(len(ends), 1)
    return 2 * total.nbytes * min(len(order), num_groups) // num_groups
