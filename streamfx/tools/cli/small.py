"""The self-test of `streamfx doctor`: a small decoder, compared with eager."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamfx.tools.inspect.verify import Verification, verify


class SmallDecoder(nn.Module):
    """A decoder with one layer, in float64."""

    def __init__(self, width: int = 16, vocabulary: int = 50) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        """Return the cross-entropy of each next token."""
        x = self.embed(ids)
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def difference() -> Verification:
    """Compare one step with and without the backend."""
    torch.manual_seed(0)
    return verify(SmallDecoder(), torch.randint(0, 50, (2, 40)), options={"chunk_size": 16, "strict": True})
