"""Decoders written by hand, each in a style of its own. All are tiny; `forward` takes ids and labels and returns a loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.decoders.fused import CausalHeads, Plain
from tests.support.decoders.parts import HEAD, HEADS, VOCABULARY, WIDTH, Decoder, Heads, RMSNorm, SwiGLU, loss_of, made

__all__ = ["HEAD", "HEADS", "VOCABULARY", "WIDTH", "CausalHeads", "Decoder", "Heads", "Plain", "SwiGLU", "loss_of", "made"]

INF = float("inf")


def with_heads(attention: type[nn.Module], decoder: type[Decoder] = Decoder) -> type[Decoder]:
    """The decoder that attends so."""
    return type("Styled", (decoder,), {"attention": attention})


def between_rows(scores: Tensor) -> Tensor:
    """How far each key is behind its row."""
    at = torch.arange(scores.shape[-1], device=scores.device)
    return at[None, :] - at[:, None]


# -- fused attention


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


class BooleanHeads(Heads):
    """A boolean mask that is built from positions, per call."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        position = torch.arange(q.shape[2], device=q.device)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=position[:, None] >= position[None, :], scale=0.3)


class OpenHeads(Heads):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class FusedWindowHeads(Heads):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        delta = between_rows(k[..., 0])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=(delta <= 0) & (delta > -WindowHeads.window))


class MaskedHeads(Heads):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        self.mask = mask
        return super().forward(x)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)


class GivenMask(Decoder):
    """The whole [B, 1, T, T] mask comes from outside."""

    attention = MaskedHeads

    def forward(self, ids: Tensor, labels: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return loss_of(self.logits(ids, mask=mask), labels)


class PaddingMask(GivenMask):
    """Causal and not padding: `attention_mask` [B, T] is data."""

    def forward(self, ids: Tensor, labels: Tensor, attention_mask: Tensor) -> Tensor:  # type: ignore[override]
        t = ids.shape[1]
        causal = torch.ones(t, t, dtype=torch.bool, device=ids.device).tril()
        itself = torch.eye(t, dtype=torch.bool, device=ids.device)
        return super().forward(ids, labels, (causal & attention_mask.bool()[:, None, None, :]) | itself)


# -- attention spelled out, each with another way to write a mask


class SpelledHeads(Heads):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = self.mask(q @ k.transpose(-2, -1) / math.sqrt(HEAD))
        return torch.softmax(scores, dim=-1) @ v

    def mask(self, scores: Tensor) -> Tensor:
        t = scores.shape[-1]
        hidden = torch.triu(torch.ones(t, t, dtype=torch.bool, device=scores.device), diagonal=1)
        return scores.masked_fill(hidden, -INF)


class Triangle(Decoder):
    attention = SpelledHeads


class AdditiveHeads(SpelledHeads):
    """`triu` of a matrix of minus infinities, added."""

    def mask(self, scores: Tensor) -> Tensor:
        t = scores.shape[-1]
        return scores + torch.full((t, t), -INF, dtype=scores.dtype, device=scores.device).triu(1)


class BufferHeads(SpelledHeads):
    """A registered `tril` buffer for the longest sequence, cut to size."""

    tril: Tensor

    def __init__(self, longest: int = 48) -> None:
        super().__init__()
        self.register_buffer("tril", torch.tril(torch.ones(longest, longest)).view(1, 1, longest, longest))

    def mask(self, scores: Tensor) -> Tensor:
        t = scores.shape[-1]
        return scores.masked_fill(self.tril[:, :, :t, :t] == 0, -INF)


class TrilBuffer(Decoder):
    attention = BufferHeads


class AlibiHeads(SpelledHeads):
    def mask(self, scores: Tensor) -> Tensor:
        distance = between_rows(scores)
        slopes = torch.tensor([2.0**-i for i in range(1, HEADS + 1)], dtype=scores.dtype, device=scores.device)
        return (scores + slopes[:, None, None] * distance).masked_fill(distance > 0, torch.finfo(scores.dtype).min)


class SoftcapHeads(SpelledHeads):
    def mask(self, scores: Tensor) -> Tensor:
        return super().mask(5.0 * torch.tanh(scores / 5.0))


class Softcap(Decoder):
    attention = SoftcapHeads

    def logits(self, ids: Tensor, **more: Any) -> Tensor:
        return 3.0 * torch.tanh(super().logits(ids, **more) / 3.0)


class WindowHeads(SpelledHeads):
    """Each row sees itself and the four before it."""

    window = 5

    def mask(self, scores: Tensor) -> Tensor:
        row = torch.arange(scores.shape[-2], device=scores.device)[:, None]
        column = torch.arange(scores.shape[-1], device=scores.device)[None, :]
        visible = (column <= row) & (row - column < self.window)
        return torch.where(visible, scores, torch.tensor(-INF, dtype=scores.dtype, device=scores.device))


class Window(Decoder):
    attention = WindowHeads


class OpenSpelledHeads(SpelledHeads):
    def mask(self, scores: Tensor) -> Tensor:
        return scores


class EinsumHeads(nn.Module):
    """Weights [H, D, E]; everything in einsum, the result contracted over heads."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Parameter(torch.randn(HEADS, WIDTH, HEAD) * 0.3) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("btd,hde->bhte", x, w) for w in (self.wq, self.wk, self.wv))
        scores = torch.einsum("bhqe,bhke->bhqk", q, k) * HEAD**-0.5
        keep = torch.ones(x.shape[1], x.shape[1], device=x.device).tril().bool()
        weights = scores.masked_fill(~keep, -INF).softmax(-1)
        return torch.einsum("bhqk,bhke,hde->bqd", weights, v, self.wo)


# -- rotary positions


class ComplexHeads(Heads):
    """Rotary positions as a product of complex numbers; the table is a buffer."""

    rotary: Tensor

    def __init__(self) -> None:
        super().__init__()
        frequency = 1.0 / 100 ** (torch.arange(0, HEAD, 2, dtype=torch.float64) / HEAD)
        angle = torch.outer(torch.arange(64, dtype=torch.float64), frequency)
        self.register_buffer("rotary", torch.polar(torch.ones_like(angle), angle))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        turn = self.rotary[: q.shape[2]]
        pairs = (torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) for x in (q, k))
        q, k = (torch.view_as_real(x * turn).flatten(-2) for x in pairs)
        return super().mix(q, k, v)


class HalfRopeHeads(Heads):
    """Rotary positions by rotating halves, the tables made per call."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        frequency = 1.0 / 100 ** (torch.arange(0, HEAD, 2, dtype=q.dtype, device=q.device) / HEAD)
        angle = torch.arange(q.shape[2], dtype=q.dtype, device=q.device)[:, None] * frequency
        cos, sin = (torch.cat((part, part), -1) for part in (angle.cos(), angle.sin()))
        q, k = (x * cos + self.turned(x) * sin for x in (q, k))
        return super().mix(q, k, v)

    @staticmethod
    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat((-second, first), dim=-1)


class HalfRope(Decoder):
    attention = HalfRopeHeads


# -- encoders, and other layouts


class Bidirectional(Decoder):
    """An encoder: every row sees every row; the loss is on given labels."""

    attention: type[nn.Module] = OpenHeads

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(ids).transpose(1, 2), labels)


class CrossAttention(nn.Module):
    """A causal decoder that also looks into a memory of another length."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attend = nn.Embedding(VOCABULARY, WIDTH), CausalHeads()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor, memory: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.attend(self.norm(x))
        projected = self.q(x), self.k(memory), self.v(memory)
        q, k, v = (p.unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for p in projected)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return loss_of(self.head(x), labels)


class TimeFirst(nn.Module):
    """[T, B, D], heads folded into the batch for `bmm`, as in the first sequence models; learned positions, layer norm."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        self.qkv = nn.ModuleList([nn.Linear(WIDTH, 3 * WIDTH) for _ in range(layers)])
        self.out = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
        self.norm = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(layers)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        t, b = ids.shape
        x = self.embed(ids) + self.position(torch.arange(t, device=ids.device))[:, None]
        for qkv, out, norm in zip(self.qkv, self.out, self.norm, strict=True):
            q, k, v = (p.reshape(t, b * HEADS, HEAD).transpose(0, 1) for p in qkv(x).split(WIDTH, dim=-1))
            scores = torch.bmm(q, k.transpose(1, 2)) * HEAD**-0.5
            scores = scores + torch.triu(torch.full_like(scores[0], float("-inf")), 1)
            mixed = torch.bmm(scores.softmax(-1), v)
            x = norm(x + out(mixed.transpose(0, 1).reshape(t, b, WIDTH)))  # the norm comes after
        return F.cross_entropy(self.head(x).view(t * b, -1), labels.reshape(-1))


class Unbatched(nn.Module):
    """[T, D]: one sequence, 3-D attention."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.qkv = nn.ParameterList([nn.Parameter(torch.randn(3, HEADS, WIDTH, HEAD) * 0.3) for _ in range(layers)])
        self.out = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3) for _ in range(layers)])
        self.norms = nn.ModuleList([RMSNorm() for _ in range(layers)])

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        t = x.shape[0]
        for qkv, out, norm in zip(self.qkv, self.out, self.norms, strict=True):
            q, k, v = torch.matmul(norm(x), qkv)
            scores = q @ k.mT * HEAD**-0.5
            causal = torch.arange(t, device=x.device)[:, None] < torch.arange(t, device=x.device)
            weights = scores.masked_fill(causal, -torch.inf).softmax(-1)
            x = x + (weights @ v).transpose(0, 1).reshape(t, WIDTH) @ out
        return F.cross_entropy(x @ self.embed.weight.T, labels)


class NanoGPT(nn.Module):
    """Learned positions, gelu, tied head, fused qkv; the loss on `logits[:, :-1]` or on given targets."""

    def __init__(self, layers: int = 2, shifted_inside: bool = False) -> None:
        super().__init__()
        self.shifted_inside = shifted_inside
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList([FusedHeads() for _ in range(layers)])
        self.fc = nn.ModuleList([nn.Linear(WIDTH, 4 * WIDTH) for _ in range(layers)])
        self.proj = nn.ModuleList([nn.Linear(4 * WIDTH, WIDTH) for _ in range(layers)])
        self.ln = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2 * layers + 1)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.wte(ids) + self.wpe(torch.arange(ids.size(1), device=ids.device))
        for i, (block, fc, proj) in enumerate(zip(self.blocks, self.fc, self.proj, strict=True)):
            x = x + block(self.ln[2 * i](x))
            x = x + proj(F.gelu(fc(self.ln[2 * i + 1](x)), approximate="tanh"))
        logits = self.head(self.ln[-1](x))
        if self.shifted_inside:
            logits, targets = logits[:, :-1].contiguous(), targets[:, 1:].contiguous()
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-100)


CAUSAL: dict[str, Callable[[], nn.Module]] = {
    "plain": Plain,
    "fused_qkv": FusedQKV,
    "grouped": with_heads(GroupedHeads),
    "boolean_mask": with_heads(BooleanHeads),
    "triangle": Triangle,
    "additive_triangle": with_heads(AdditiveHeads),
    "alibi": with_heads(AlibiHeads),
    "softcap": Softcap,
    "einsum": with_heads(EinsumHeads),
    "complex_rope": with_heads(ComplexHeads),
    "half_rope": HalfRope,
    "tril_buffer": TrilBuffer,
}
WINDOWED: dict[str, Callable[[], nn.Module]] = {"window": Window, "fused_window": with_heads(FusedWindowHeads)}
OPEN: dict[str, Callable[[], nn.Module]] = {
    "bidirectional": Bidirectional,
    "bidirectional_spelled": with_heads(OpenSpelledHeads, Bidirectional),
}
