"""The numbers that a graph was run with, as plain data: those of masks, tables and ids exactly, those of weights drawn alike."""

from __future__ import annotations

import base64
import math
import zlib
from typing import Any

import torch
from torch import Tensor

from streamfx.torch_private import real_values

Plain = Any
MOST_EXACT = 4096  # bytes, as they are compressed


def exact(tensor: Tensor) -> Plain:
    """All numbers of a tensor."""
    with real_values():  # a trace that holds the tensor may be going on
        data = tensor.detach().cpu().contiguous()
        packed = zlib.compress(data.reshape(-1).view(torch.uint8).numpy().tobytes(), 9) if data.numel() else b""
    return {"dtype": dtype_name(data.dtype), "shape": list(data.shape), "bytes": base64.b64encode(packed).decode()}


def drawn(tensor: Tensor) -> Plain:
    """The mean and the deviation of a tensor's numbers; numbers that are all the same have no deviation."""
    data = tensor.detach().cpu().double()
    mean = float(data.mean()) if data.numel() else 0.0
    deviation = float(data.std(correction=0)) if data.numel() else 0.0
    return {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape), "drawn": [_short(mean), _short(deviation)]}


def written_numbers(value: Any, is_weight: bool) -> Plain:
    """An input of a graph. Numbers of weights, and of what takes many bytes, are drawn where that is possible."""
    if not isinstance(value, Tensor):
        return value
    can_be_drawn = value.is_floating_point() and bool(value.isfinite().all())
    if is_weight and can_be_drawn:
        return drawn(value)
    data = exact(value)
    return drawn(value) if can_be_drawn and len(data["bytes"]) > MOST_EXACT else data


def numbers_of(data: Plain, seed: int = 0) -> Any:
    """An input of plain data; what is drawn depends on the seed alone."""
    if not isinstance(data, dict):
        return data
    dtype, shape = getattr(torch, data["dtype"]), data["shape"]
    if "bytes" in data:
        if not math.prod(shape):
            return torch.empty(shape, dtype=dtype)
        packed = bytearray(zlib.decompress(base64.b64decode(data["bytes"])))
        return torch.frombuffer(packed, dtype=torch.uint8).view(dtype).reshape(shape)
    mean, deviation = data["drawn"]
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).mul_(deviation).add_(mean).to(dtype)


def number_of(value: Any) -> Any:
    """A number of Python's, of one of sympy's."""
    return bool(value) if value.is_Boolean else int(value) if value.is_Integer else float(value)


def _short(number: float) -> float:
    return float(f"{number:.3g}")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
