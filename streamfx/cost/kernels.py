"""The CUDA kernel that computes a call of fused attention: kernels differ in speed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamfx.kernels import cuda_attention, cuda_cudnn
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
    scale = arguments.get("scale")
    if "left" not in arguments and cuda_cudnn.supports_past_and_diagonal(query, key, value, scale):
        return CUDNN
    return FLASH if cuda_attention.flash_supports(query, value, scale) else ""
