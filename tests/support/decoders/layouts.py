"""Decoders in layouts of their own: time first, without a batch, and small ones as people write them for themselves."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.decoders.fused import FusedHeads
from tests.support.decoders.parts import HEAD, HEADS, VOCABULARY, WIDTH, RMSNorm


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
