"""`torch.nn.TransformerEncoder` and `TransformerDecoder` as language models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.packages.checking import HEADS, LENGTH, ROWS, VOCABULARY, WIDTH, Builder, Step, tokens_and_labels


class Model(nn.Module):
    """Token and position embeddings, a stack of torch's layers, a head.

    `causal` is what the stack is told of its mask; without that it compares the mask with a causal one and breaks the graph.
    """

    def __init__(
        self,
        layers: nn.Module,
        mask: str | None = "bool",
        causal: bool | None = False,
        batch_first: bool = True,
    ) -> None:
        super().__init__()
        self.layers, self.mask, self.causal, self.batch_first = layers, mask, causal, batch_first
        self.embed, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, memory: Tensor | None = None, lengths: Tensor | None = None) -> Tensor:
        length = ids.shape[1]
        x = self.turned(self.embed(ids) + self.positions(torch.arange(length)))
        mask = self.mask_of(length)
        padding = None if lengths is None else torch.arange(length) >= lengths[:, None]
        if padding is not None and mask is not None and mask.is_floating_point():
            padding = torch.zeros_like(padding, dtype=mask.dtype).masked_fill(padding, -torch.inf)
        if memory is None:
            x = self.layers(x, mask=mask, is_causal=self.causal, src_key_padding_mask=padding)
        else:
            others = {"tgt_is_causal": self.causal, "tgt_key_padding_mask": padding}
            x = self.layers(x, self.turned(memory), tgt_mask=mask, **others)
        return self.head(self.turned(x))

    def mask_of(self, length: int) -> Tensor | None:
        if self.mask == "bool":
            return torch.ones(length, length, dtype=torch.bool).triu(1)
        return nn.Transformer.generate_square_subsequent_mask(length) if self.mask == "float" else None

    def turned(self, x: Tensor) -> Tensor:
        return x if self.batch_first else x.transpose(0, 1)


def encoder(padded: bool = False, norm_first: bool = False, batch_first: bool = True, **model: Any) -> Builder:
    def build() -> tuple[nn.Module, dict[str, Any]]:
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, 0.0, "gelu", batch_first=batch_first, norm_first=norm_first)
        layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        return Step(Model(layers, batch_first=batch_first, **model)), tokens_and_labels() | lengths(padded)

    return build


def decoder(padded: bool = False, norm_first: bool = False, batch_first: bool = True, **model: Any) -> Builder:
    def build() -> tuple[nn.Module, dict[str, Any]]:
        layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 48, 0.0, batch_first=batch_first, norm_first=norm_first)
        inputs = tokens_and_labels() | lengths(padded) | {"memory": torch.randn(ROWS, 11, WIDTH, requires_grad=True)}
        return Step(Model(nn.TransformerDecoder(layer, 2), batch_first=batch_first, **model)), inputs

    return build


def lengths(padded: bool) -> dict[str, Tensor]:
    return {"lengths": torch.tensor([LENGTH, LENGTH - 6])} if padded else {}


CAUSAL, MASKED, WITH_MEMORY = {"causal"}, {"masked"}, {"causal", "masked"}
SPREAD: dict[str, tuple[Builder, set[str]]] = {
    "encoder, boolean mask": (encoder(), CAUSAL),
    "encoder, padded": (encoder(padded=True, mask="float", norm_first=True), CAUSAL),
    "decoder": (decoder(norm_first=True, mask="float", causal=True), WITH_MEMORY),
}
MORE: dict[str, tuple[Builder, set[str]]] = {
    "encoder, causal": (encoder(mask="float", causal=True), CAUSAL),
    "encoder, sequence first": (encoder(batch_first=False, norm_first=True), CAUSAL),
    "encoder, boolean mask and padding": (encoder(padded=True), CAUSAL),
    "encoder, sees all": (encoder(mask=None), MASKED),
    "encoder, sees all but padding": (encoder(mask=None, padded=True), MASKED),
    "decoder, sequence first, padded": (decoder(batch_first=False, padded=True), WITH_MEMORY),
}
BREAKS = encoder(causal=None)
