"""Decoders that call fused attention, causal by flag or by a mask that is made or given."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.decoders.parts import HEAD, HEADS, WIDTH, Decoder, Heads, loss_of


class CausalHeads(Heads):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Plain(Decoder):
    attention = CausalHeads


class FusedHeads(nn.Module):
    """One projection for q, k and v, split by `chunk`."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (part.view(b, t, HEADS, HEAD).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o(mixed.transpose(1, 2).contiguous().view(b, t, WIDTH))
        return out


class FusedQKV(Decoder):
    """Targets come shifted already, and the flattened logits are compared with them."""

    attention = FusedHeads

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.logits(ids)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1), ignore_index=-100)


class GroupedHeads(Heads):
    def __init__(self) -> None:
        super().__init__(key_heads=1)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Grouped(Decoder):
    attention = GroupedHeads


class BiasHeads(Heads):
    """A boolean mask that is built from positions, per call."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        position = torch.arange(q.shape[2], device=q.device)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=position[:, None] >= position[None, :], scale=0.3)


class BooleanMask(Decoder):
    attention = BiasHeads


class MaskedHeads(Heads):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        self.mask = mask
        return super().forward(x)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)


class PaddingMask(Decoder):
    """Causal and not padding: `attention_mask` [B, T] is data."""

    attention = MaskedHeads

    def forward(self, ids: Tensor, labels: Tensor, attention_mask: Tensor) -> Tensor:  # type: ignore[override]
        t = ids.shape[1]
        causal = torch.ones(t, t, dtype=torch.bool, device=ids.device).tril()
        itself = torch.eye(t, dtype=torch.bool, device=ids.device)
        mask = (causal & attention_mask.bool()[:, None, None, :]) | itself
        return loss_of(self.logits(ids, mask=mask), labels)


class GivenMask(Decoder):
    """The whole [B, 1, T, T] mask comes from outside."""

    attention = MaskedHeads

    def forward(self, ids: Tensor, labels: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return loss_of(self.logits(ids, mask=mask), labels)
