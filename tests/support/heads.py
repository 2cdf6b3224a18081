"""One attention layer, and heads that compute logits in different ways."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.tables import named_cases

VOCABULARY, WIDTH, BATCH, LENGTH = 40, 8, 2, 11


class Decoder(nn.Module):
    """One attention layer and a head: `head(self, hidden, ids)` gives the logits, or several outputs, logits first."""

    def __init__(self, head: Callable[..., Any]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH))
        self.down, self.up = nn.Parameter(torch.randn(WIDTH, 2)), nn.Parameter(torch.randn(2, VOCABULARY))
        self.bias = nn.Parameter(torch.randn(VOCABULARY))
        self.register_buffer("mask", torch.randn(VOCABULARY))
        self.head = head

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        x = self.embedding(ids)
        query, key, value = self.qkv(x)[:, None].chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True)[:, 0])
        made = self.head(self, F.layer_norm(x, (WIDTH,)), ids)
        outputs = made if isinstance(made, tuple) else (made,)
        if labels is None:
            return outputs[0]
        logits = outputs[0].reshape(-1, outputs[0].shape[-1])
        return F.cross_entropy(logits, labels.reshape(-1)[-logits.shape[0] :]), *outputs


def plain_head(model: Decoder, x: Tensor, ids: Tensor) -> Tensor:
    return F.linear(x, model.weight)


def capped_head(model: Decoder, x: Tensor, ids: Tensor) -> Tensor:
    return torch.tanh(F.linear(x, model.weight) / 3.0) * 3.0


def decoder(head: Callable[..., Any] = capped_head) -> Decoder:
    torch.manual_seed(0)
    return Decoder(head).double()


def some_ids(length: int = LENGTH) -> Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, length), generator=torch.Generator().manual_seed(length))


def of_logits(function: Callable[[Tensor], Any]) -> Callable[..., Any]:
    return lambda model, x, ids: function(F.linear(x, model.weight))


def with_views(logits: Tensor) -> tuple[Tensor, ...]:
    return logits, logits[:, :-1], logits.transpose(1, 2)


def without_grad(model: Decoder, x: Tensor) -> tuple[Tensor, Tensor]:
    logits = F.linear(x, model.weight)
    with torch.no_grad():
        return logits, F.linear(x, model.weight) * 2


def with_item(logits: Tensor) -> Tensor:
    logits[:, :, 0] = -5.0
    return logits


def doubled_before(logits: Tensor) -> Tensor:
    doubled = logits * 2
    logits.mul_(3)
    return doubled


# norms that read other rows: no row can be computed alone
MIXED: dict[str, Callable[[Tensor], Tensor]] = named_cases("norms", globals(), "x")
HEADS: dict[str, tuple[Callable[..., Any], int]] = named_cases("heads", globals())
HEADS |= {name: ((lambda m, x, ids, norm=norm: F.linear(norm(x), m.weight)), 1) for name, norm in MIXED.items()}
HEADS |= named_cases("other heads", globals())
