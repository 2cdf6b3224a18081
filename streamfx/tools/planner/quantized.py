"""Frozen weights in fewer bits, dequantized on use. Only their size is modeled, not their values.

The sizes are those of bitsandbytes' nf4 with double quantization (Dettmers et al., 2023, section 3), of one byte per
element and a scale per row for int8, and of one byte per element and a scale per weight for fp8.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from streamfx.dialect.quantized import UNPACKED
from streamfx.tools.inspect.layers import layers_of

BLOCK = 64  # elements that share a one-byte scale
SECOND_BLOCK = 256  # scales that share a float32 scale
MIN_QUANTIZED_ELEMENTS = 1 << 20  # elements; smaller weights are not quantized


@dataclass(frozen=True)
class Scheme:
    """Bytes of the packed elements and of the scales of a weight."""

    packed: Callable[[Tensor], int]
    scales: Callable[[Tensor], int]


SCHEMES = {
    "nf4": Scheme(
        lambda weight: weight.numel() // 2,
        lambda weight: weight.numel() // BLOCK + 4 * (weight.numel() // (BLOCK * SECOND_BLOCK) + 2),
    ),
    "int8": Scheme(lambda weight: weight.numel(), lambda weight: 4 * (weight.numel() // weight.shape[-1])),
    "fp8": Scheme(lambda weight: weight.numel(), lambda weight: 4),
}


class DequantizedWeight(nn.Module):
    """A weight stored as packed bytes and scales. The inverse yields buffers of the right size without values."""

    def __init__(self, weight: Tensor, scheme: Scheme) -> None:
        super().__init__()
        self.shape, self.dtype, self.scheme = weight.shape, weight.dtype, scheme

    def forward(self, packed: Tensor, scales: Tensor) -> Tensor:
        unpacked: Tensor = UNPACKED(packed, scales, self.shape, self.dtype)
        return unpacked

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return uninitialized packed bytes and scales of the right sizes."""
        sizes = self.scheme.packed(weight), self.scheme.scales(weight)
        packed, scales = (torch.empty(size, dtype=torch.uint8, device=weight.device) for size in sizes)
        return packed, scales


def quantized(model: nn.Module, name: str) -> nn.Module:
    """Freeze a model and quantize the large matrices of its layers, including those of experts."""
    model.requires_grad_(False)
    for layer in layers_of(model):
        for module in list(layer.modules()):
            for key, weight in list(module.named_parameters(recurse=False)):
                if weight.dim() >= 2 and weight.numel() >= MIN_QUANTIZED_ELEMENTS:
                    parametrize.register_parametrization(module, key, DequantizedWeight(weight, SCHEMES[name]), unsafe=True)
    return model
