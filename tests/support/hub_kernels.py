"""Kernels for attention as the `kernels` package loads them from the hub: operators in a namespace that names a build.

flash-attn2's is the flash-attn package's file with another namespace, and so is this stand-in; flash-attn3's has one operator for
dense and packed rows; vllm-flash-attn3 registers what it has compiled, without shapes of results.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

INTERFACE = Path(__file__).parent / "installed" / "flash_attn" / "interface.py"
BUILD = "cuda_8f3c1d2"


@cache
def flash_attn2(kernel: str = f"_flash_attn2_{BUILD}") -> ModuleType:
    """The functions of flash-attn2, with operators in the namespace `kernel`."""
    text = INTERFACE.read_text()
    text = text.replace('"flash_attn::', f'"{kernel}::').replace("torch.ops.flash_attn.", f"torch.ops.{kernel}.")
    module = sys.modules[kernel] = ModuleType(kernel)  # Dynamo imports it by its name
    exec(compile(text, str(INTERFACE), "exec"), module.__dict__)
    return module


@contextmanager
def loaded_by_transformers() -> Iterator[str]:
    """A name for `attn_implementation` that loads flash-attn2."""
    from transformers import modeling_flash_attention_utils
    from transformers.integrations import hub_kernels

    with (
        patch.object(hub_kernels, "is_kernels_available", lambda *_: True),
        patch.object(hub_kernels, "get_kernel", lambda *_, **__: flash_attn2()),
        patch.object(modeling_flash_attention_utils, "_loaded_implementation", None),
    ):
        yield "kernels-community/flash-attn2"


# -- flash-attn3, with the first of its arguments

FA3 = f"_flash_attn3_{BUILD}"


@torch.library.custom_op(f"{FA3}::_flash_attn_forward", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False) -> tuple[Tensor, Tensor]:
    query, key, value = (item.transpose(1, 2) for item in (q, k, v))
    out = F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=softmax_scale)
    return out.transpose(1, 2).contiguous(), q.new_zeros(q.shape[0], q.shape[2], q.shape[1])


@_forward.register_fake
def _(q: Tensor, *others: Any, **more: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[0], q.shape[2], q.shape[1])


def flash_attn3(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = getattr(torch.ops, FA3)._flash_attn_forward(q, k, v, None, True)[0]
    return out


# -- vllm-flash-attn3

VLLM = f"_vllm_flash_attn3_{BUILD}"
_library = torch.library.Library(VLLM, "DEF")
_library.define("fwd(Tensor q, Tensor k, Tensor v, bool is_causal) -> Tensor[]")
_library.impl("fwd", lambda q, k, v, causal: [_forward(q, k, v, None, causal)[0]], "CPU")


def vllm_flash_attn3(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    (out,) = getattr(torch.ops, VLLM).fwd(q, k, v, True)
    return out  # type: ignore[no-any-return]
