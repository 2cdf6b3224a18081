"""One attention layer, and heads that compute logits in different ways."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
MIXED: dict[str, Callable[[Tensor], Tensor]] = {
    "less the mean over time": lambda x: x - x.mean(1, keepdim=True),
    "less the mean of all": lambda x: x - x.exp().mean(),
    "less the mean over sequences and time": lambda x: x - x.mean((0, 1)),
    "in proportion to all": lambda x: x * x.square().mean(dim=(0, 1, 2)).rsqrt(),
    "less the mean over no dimension, which is all": lambda x: x - x.exp().mean((), keepdim=True),
    "a norm behind a mean over time": lambda x: F.rms_norm(x - x.mean(dim=-2, keepdim=True), (WIDTH,)),
    "a scale made of rows": lambda x: F.layer_norm(x, (WIDTH,), x.std((0, 1))),
}
HEADS: dict[str, tuple[Callable[..., Any], int]] = {
    "linear": (plain_head, 1),
    "softcap": (capped_head, 1),
    "bias": (lambda m, x, ids: F.linear(x, m.weight, m.bias), 1),
    "transposed weight": (lambda m, x, ids: x @ m.weight.T, 1),
    "weight transposed by an operator": (lambda m, x, ids: x @ torch.ops.aten.numpy_T(m.weight), 1),  # torch 2.14's `.T`
    "einsum": (lambda m, x, ids: torch.einsum("btd,vd->btv", x, m.weight), 1),
    "low rank": (lambda m, x, ids: x @ m.down @ m.up, 1),
    "adapter": (lambda m, x, ids: F.linear(x, m.weight) + 2 * (x @ m.down @ m.up), 1),
    "mask": (lambda m, x, ids: F.linear(x, m.weight).masked_fill(m.mask > 0, -1e4), 1),
    "log-probabilities": (lambda m, x, ids: F.log_softmax(F.linear(x, m.weight), -1), 1),
    "unbatched": (lambda m, x, ids: F.linear(x.view(-1, WIDTH), m.weight), 1),
    "time first": (lambda m, x, ids: F.linear(x.transpose(0, 1), m.weight).transpose(0, 1), 1),
    "two heads": (lambda m, x, ids: (F.linear(x, m.weight), F.linear(x * 2, m.weight)), 2),
    "logits and probabilities": (of_logits(lambda made: (made, made.softmax(-1))), 2),
    "twice the same": (lambda m, x, ids: (F.linear(x, m.weight),) * 2, 2),
    "a view of it": (of_logits(with_views), 3),
    "detached": (lambda m, x, ids: (F.linear(x, m.weight), F.linear(x, m.weight).detach()), 2),
    **{name: ((lambda m, x, ids, norm=norm: F.linear(norm(x), m.weight)), 1) for name, norm in MIXED.items()},
    "weights made of rows": (lambda m, x, ids: F.linear(x, m.weight * x.exp().mean()), 1),
    "all rows added": (lambda m, x, ids: F.linear(x, m.weight) + x.exp().mean(), 1),
    "hidden states too": (lambda m, x, ids: (F.linear(x, m.weight), x), 1),
    "a view of hidden states": (lambda m, x, ids: (F.linear(x, m.weight), x.view(-1, WIDTH)), 1),
    "a view of a parameter too": (lambda m, x, ids: (F.linear(x, m.weight), m.weight.view(-1)), 1),
    "no_grad inside": (lambda m, x, ids: without_grad(m, x), 2),
    "less a logarithm of sums": (of_logits(lambda made: made - made.logsumexp(-1, keepdim=True)), 1),
    "less the largest": (of_logits(lambda made: made - made.amax(-1, keepdim=True)), 0),
    "less the third": (of_logits(lambda made: made - made.topk(3).values[..., -1:].detach()), 0),
    "capped beside the largest": (of_logits(lambda made: (torch.tanh(made / 3.0) * 3.0, made.amax(-1))), 0),
    "written into": (of_logits(lambda made: made.add_(1)), 0),
    "set item": (of_logits(with_item), 0),
    "made from what is then written into": (of_logits(doubled_before), 0),
    "dropout": (lambda m, x, ids: F.dropout(F.linear(x, m.weight), 0.0), 0),
}
