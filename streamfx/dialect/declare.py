"""Declare an operator `streamfx::name`, and later give it an implementation.

A declared operator can be traced, because its results on fake tensors are known; it runs on real tensors as soon as the
module that implements it is imported (`runtime/implementations.py` imports them all).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from streamfx.torch_private import OpOverload

LIBRARY = torch.library.Library("streamfx", "FRAGMENT")  # torch removes the operators if this object dies


def declare(schema: str, fake: Callable[..., Any], flops: Callable[..., int] | None = None) -> OpOverload:
    """Define the operator of a schema such as `"all_reduce(Tensor x, str op) -> Tensor"`, and return its default overload.

    `fake` takes the operator's arguments as fake tensors and returns uninitialized results of the right shapes, dtypes and
    strides. `flops` takes the arguments, with shapes in place of tensors, for torch's FLOP counter; None: no FLOPs are
    counted.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    torch.library.register_fake(f"streamfx::{name}", fake, lib=LIBRARY)
    packet = getattr(torch.ops.streamfx, name)
    if flops is not None:
        register_flop_formula(packet)(flops)
    overload: OpOverload = packet.default
    return overload


def implement(operator: OpOverload, function: Callable[..., Any]) -> None:
    """Register the function that computes a declared operator on real tensors of any device.

    The function does not define a gradient: under autograd it needs `torch.library.register_autograd`.
    """
    LIBRARY.impl(operator, function, "CompositeExplicitAutograd")
