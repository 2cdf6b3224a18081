"""`torch.nn.TransformerEncoder` and `TransformerDecoder` as language models."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.packages.checking import HEADS, LENGTH, ROWS, VOCABULARY, WIDTH, Builder, Step, tokens_and_labels
from tests.support.tables import named_cases


class Model(nn.Module):
    """Token and position embeddings, a stack of torch's layers, a head.

    `causal` is the stack's `is_causal`; if it is None, the stack compares the mask with a causal one and breaks the graph.
    """

    def __init__(self, layers: nn.Module, mask: str | None = "bool", causal: bool | None = False) -> None:
        super().__init__()
        self.layers, self.mask, self.causal = layers, mask, causal
        self.embed, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, memory: Tensor | None = None, lengths: Tensor | None = None) -> Tensor:
        length = ids.shape[1]
        x = (self.embed(ids) + self.positions(torch.arange(length))).transpose(0, 1)
        mask = self.mask_of(length)
        padding = None if lengths is None else torch.arange(length) >= lengths[:, None]
        if padding is not None and mask is not None and mask.is_floating_point():
            padding = torch.zeros_like(padding, dtype=mask.dtype).masked_fill(padding, -torch.inf)
        if memory is None:
            x = self.layers(x, mask=mask, is_causal=self.causal, src_key_padding_mask=padding)
        else:
            others = {"tgt_is_causal": self.causal, "tgt_key_padding_mask": padding}
            x = self.layers(x, memory.transpose(0, 1), tgt_mask=mask, **others)
        return self.head(x.transpose(0, 1))

    def mask_of(self, length: int) -> Tensor | None:
        if self.mask == "bool":
            return torch.ones(length, length, dtype=torch.bool).triu(1)
        return nn.Transformer.generate_square_subsequent_mask(length) if self.mask == "float" else None


def encoder(padded: bool = False, norm_first: bool = False, **model: Any) -> Builder:
    def build() -> tuple[nn.Module, dict[str, Any]]:
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, 0.0, "gelu", norm_first=norm_first)
        layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        return Step(Model(layers, **model)), tokens_and_labels() | lengths(padded)

    return build


def decoder(padded: bool = False, **model: Any) -> Builder:
    def build() -> tuple[nn.Module, dict[str, Any]]:
        layers = nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, HEADS, 48, 0.0), 2)
        memory = {"memory": torch.randn(ROWS, 11, WIDTH, requires_grad=True)}
        return Step(Model(layers, **model)), tokens_and_labels() | lengths(padded) | memory

    return build


def lengths(padded: bool) -> dict[str, Tensor]:
    return {"lengths": torch.tensor([LENGTH, LENGTH - 6])} if padded else {}


DECODERS: dict[str, Builder] = named_cases("decoders", globals())
BREAKS = encoder(causal=None)
