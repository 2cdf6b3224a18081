"""A decoder and a loss of your own: nothing of them is known to the backend, and both stream.

    python examples/custom_loss.py             # sequences of 8,192 tokens, a few minutes on two CPU cores
    python examples/custom_loss.py --quick     # a tiny model, seconds

The decoder has windowed attention in every other layer. The loss weights rare tokens by their own probability (focal), keeps the
logits' normalizer near one (z-loss), and adds an entropy bonus.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from side_by_side import Report, arguments, compare, train
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Layer(nn.Module):
    def __init__(self, width: int, window: int | None) -> None:
        super().__init__()
        self.window = window
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, 32)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(x), is_causal=self.window is None)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        gate, value = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)

    def mask(self, x: Tensor) -> Tensor | None:
        if self.window is None:
            return None
        row = torch.arange(x.shape[1], device=x.device)
        distance = row[:, None] - row
        return (distance >= 0) & (distance < self.window)


class Decoder(nn.Module):
    def __init__(self, width: int, layers: int, vocabulary: int, checkpointing: bool) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        self.layers = nn.ModuleList(Layer(width, None if i % 2 else 64) for i in range(layers))
        self.norm = nn.RMSNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointing else layer(x)
        return loss_of(self.head(self.norm(x))[:, :-1], ids[:, 1:])


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Focal loss, z-loss and an entropy bonus."""
    logp, normalizer = logits.log_softmax(-1), logits.logsumexp(-1)
    nll = -logp.gather(-1, labels[..., None]).squeeze(-1)
    focal = (1 - (-nll).exp()) ** 2 * nll
    entropy = -(logp.exp() * logp).sum(-1)
    return (focal + 1e-4 * normalizer.square() - 1e-3 * entropy).mean()


def work(method: str, options: argparse.Namespace, report: Report) -> None:
    from trl_steps import byte_tokenizer
    from workload import standard_library_text

    torch.manual_seed(0)
    width, layers, vocabulary = (64, 2, 500) if options.quick else (384, 6, 16_000)
    model = Decoder(width, layers, vocabulary, method == "checkpointing")
    tokens = byte_tokenizer()(standard_library_text()[: options.length * options.steps])["input_ids"]
    run = torch.compile(model, backend="streambp") if method == "streambp" else model  # the one line
    train(model, run, torch.tensor(tokens).reshape(options.steps, 1, options.length), report)


if __name__ == "__main__":
    compare(work, arguments(__doc__ or "", length=8192, steps=3))
