"""Identify attention kernels, loaded from the Hub by the `kernels` package, that define the flash-attn package's
operators.

A kernel build registers its operators in its own namespace: `_flash_attn2_cuda_8f3c1d2` is a build of flash-attn2.
Its flash_attn_interface.py is a copy from the flash-attn package, and defines the same operators (kernels-community,
version 4). A build whose operators take other arguments is not recognized.
"""

from __future__ import annotations

import re
from typing import Any

from streamfx.torch_private import OpOverload

PACKAGE = "flash_attn"
BUILDS = re.compile(r"_flash_attn2(_\w+)?")
ATTENTION_NAMESPACES = re.compile(r"_\w*(attn|attention)\w*|flash_attn_\d")  # namespaces of builds, and of newer packages

HEADS, OPTIONS = "q k v", "dropout_p softmax_scale causal window_size_left window_size_right softcap alibi_slopes"
ENDS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
SAVED, WRITTEN = f"dout {HEADS} out softmax_lse", "dq dk dv"
ARGUMENTS = {
    "_flash_attn_forward": f"{HEADS} {OPTIONS} return_softmax",
    "_flash_attn_varlen_forward": f"{HEADS} {ENDS} {OPTIONS} return_softmax block_table leftpad_k seqused_k zero_tensors",
    "_flash_attn_backward": f"{SAVED} {WRITTEN} {OPTIONS} deterministic rng_state",
    "_flash_attn_varlen_backward": f"{SAVED} {WRITTEN} {ENDS} {OPTIONS} deterministic rng_state zero_tensors",
}


def operator_name(target: Any) -> str | None:
    """Return an operator's name, such as `aten::mm`; None for a Python function.

    For an operator of a flash-attn build from the Hub with the arguments of the original, return the original's name:
    `_flash_attn2_cuda_8f3c1d2::_flash_attn_forward -> flash_attn::_flash_attn_forward`.
    """
    if not isinstance(target, OpOverload):
        return None
    name = target._schema.name.partition("::")[2]
    is_flash = BUILDS.fullmatch(target.namespace) and [item.name for item in target._schema.arguments] == _arguments(name)
    return f"{PACKAGE}::{name}" if is_flash else target.name()


def is_attention(target: Any) -> bool:
    """Return whether an operator's namespace looks like an attention package, so that the user could choose another kernel."""
    return isinstance(target, OpOverload) and ATTENTION_NAMESPACES.fullmatch(target.namespace) is not None


def _arguments(name: str) -> list[str]:
    """Return the argument names, in order, of the flash-attn operator `name`; empty for an unknown name."""
    return ARGUMENTS.get(name, "").split()
