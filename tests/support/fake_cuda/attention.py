"""Which operator `scaled_dot_product_attention` calls on a CUDA device, after aten/src/ATen/native/transformers.

The order of kernels and what each takes: cuda/sdp_utils.cpp (priority_order, use_flash_attention, use_mem_efficient_attention,
use_cudnn_attention). What is done to arguments before the call: attention.cpp (scaled_dot_product_attention).
"""

import ctypes
import math
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten
CAPABILITIES = {"h100": (9, 0), "a100": (8, 0), "t4": (7, 5)}
HALF = (torch.float16, torch.bfloat16)
MOST = 128  # the widest head for which cuDNN is chosen here
ALIGNED = 8  # elements: the width that flash pads heads to
CUDNN_HIDES = -65504.0  # convert_boolean_attn_mask_cudnn, until 2.11: no number from which a pass can tell that a key is hidden
BIAS = 16  # elements: the width that a bias is padded to


class Device:
    """A card of a kind, of which the calls of attention are noted."""

    def __init__(self, kind: str) -> None:
        self.kind, self.capability = kind, CAPABILITIES[kind]
        self.chosen: list[str] = []

    def install(self) -> None:
        """Let fake tensors live on it."""
        os.environ.pop("LD_PRELOAD", None)  # this process has the hooks; a compiler that it starts needs none
        assert not torch.cuda.device_count(), "a real device would be used: the process that starts this one has to hide it"
        ctypes.CDLL(os.environ["FAKE_CUDA"] + "/libguard.so").install()
        torch.cuda.get_device_capability = lambda device=None: self.capability
        torch.backends.cuda.is_flash_attention_available = lambda: True
        torch.backends.cudnn.version = lambda: 92000
        self.library = torch.library.Library("aten", "IMPL")
        for key in ("CUDA", "AutogradCUDA"):
            self.library.impl("scaled_dot_product_attention", self.attention, key)

    def choice(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> str:
        half, width, value_width = q.dtype in HALF, q.shape[-1], v.shape[-1]
        dense = all(item.stride(-1) == 1 for item in (q, k, v))
        even = width % ALIGNED == 0 and value_width % ALIGNED == 0
        allowed = torch.backends.cuda.cudnn_sdp_enabled()
        if allowed and self.kind == "h100" and half and dense and even and max(width, value_width) <= MOST:
            return "cudnn"
        square = not causal or q.shape[-2] == k.shape[-2]
        if self.capability >= (8, 0) and half and mask is None and width == value_width <= 256 and dense and square:
            return "flash"
        known = q.dtype in (torch.float32, torch.float16) or (q.dtype == torch.bfloat16 and self.capability >= (8, 0))
        aligned = width % (8 if half else 4) == 0
        return "efficient" if known and dense and aligned else "math"

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        choice = self.choice(q, k, v, attn_mask, is_causal)
        self.chosen.append(choice)
        hidden = CUDNN_HIDES if choice == "cudnn" else -math.inf
        mask, logsumexp = _as_bias(attn_mask, q, hidden), torch.is_grad_enabled()
        if choice == "cudnn":
            return aten._scaled_dot_product_cudnn_attention(q, k, v, mask, logsumexp, dropout_p, is_causal, False, scale=scale)[0]
        if choice == "flash":
            return _flash(q, k, v, dropout_p, is_causal, scale)
        if choice == "efficient":
            k, v = (item.repeat_interleave(q.shape[1] // item.shape[1], 1) if enable_gqa else item for item in (k, v))
            mask = _padded(mask, q, k)
            return aten._scaled_dot_product_efficient_attention(q, k, v, mask, logsumexp, dropout_p, is_causal, scale=scale)[0]
        return aten._scaled_dot_product_attention_math(
            q, k, v, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]


def _as_bias(mask: Tensor | None, query: Tensor, hidden: float) -> Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return mask
    zero, huge = (torch.full((), number, dtype=query.dtype, device=query.device) for number in (0.0, hidden))
    return torch.where(mask, zero, huge)


def _flash(q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool, scale: float | None) -> Tensor:
    width, missing = q.shape[-1], -q.shape[-1] % ALIGNED
    scale = width**-0.5 if scale is None else scale
    q, k, v = (F.pad(item, (0, missing)) if missing else item for item in (q, k, v))
    made = aten._scaled_dot_product_flash_attention(q, k, v, dropout, causal, False, scale=scale)[0]
    return made[..., :width] if missing else made  # type: ignore[no-any-return]


def _padded(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    if mask is None:
        return None
    keys = mask.shape[-1]
    if keys % BIAS:
        mask = F.pad(mask, (0, -keys % BIAS))[..., :keys]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
