"""What people do with logits after the model has returned them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

Loss = Callable[[Tensor, Tensor], Tensor]


def token_logps(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)


def entropy(logits: Tensor) -> Tensor:
    return -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)


def smoothed(logits: Tensor, ids: Tensor, epsilon: float = 0.1) -> Tensor:
    """As transformers' Trainer smooths labels."""
    logits, labels = logits[..., :-1, :].contiguous(), ids[..., 1:].clone()
    labels[:, 0] = -100
    log_probs = -F.log_softmax(logits, dim=-1)
    labels = labels.unsqueeze(-1)
    padding = labels.eq(-100)
    nll = log_probs.gather(dim=-1, index=labels.clamp(min=0))
    smooth = log_probs.sum(dim=-1, keepdim=True, dtype=torch.float32)
    nll.masked_fill_(padding, 0.0)
    smooth.masked_fill_(padding, 0.0)
    active = padding.numel() - padding.long().sum()
    return (1 - epsilon) * nll.sum() / active + epsilon * smooth.sum() / (active * log_probs.shape[-1])


def dpo(logits: Tensor, ids: Tensor) -> Tensor:
    chosen, rejected = token_logps(logits, ids).sum(-1)
    return -F.logsigmoid(0.1 * (chosen - rejected))


def clipped(logits: Tensor, ids: Tensor) -> Tensor:
    logps = token_logps(logits, ids)
    ratio = (logps - logps.detach()).exp()
    return -torch.min(2.0 * ratio, 2.0 * ratio.clamp(0.8, 1.2)).mean()


STREAMED: dict[str, Loss] = {
    "cross entropy, shifted": lambda x, ids: F.cross_entropy(x[:, :-1].double().reshape(-1, x.shape[-1]), ids[:, 1:].reshape(-1)),
    "cross entropy, flat": lambda x, ids: F.cross_entropy(x.view(-1, x.size(-1)), ids.view(-1)),
    "label smoothing": lambda x, ids: F.cross_entropy(x.transpose(1, 2), ids, label_smoothing=0.1),
    "sum of losses": lambda x, ids: F.cross_entropy(x.flatten(0, 1), ids.flatten(), reduction="sum", ignore_index=7),
    "weights of tokens": lambda x, ids: (F.cross_entropy(x.transpose(1, 2), ids, reduction="none") * (ids > 5)).sum(),
    "weights of classes": lambda x, ids: F.cross_entropy(x.flatten(0, 1), ids.flatten(), weight=torch.arange(x.shape[-1]).to(x)),
    "log-probabilities": lambda x, ids: -(token_logps(x, ids) * (ids > 3)).sum() / (ids > 3).sum(),
    "taken along a dimension": lambda x, ids: torch.take_along_dim(x.log_softmax(-1), ids[..., None], -1).sum(),
    "Trainer's smoothing": smoothed,
    "DPO": dpo,
    "GRPO": clipped,
    "entropy": lambda x, ids: (entropy(x) * token_logps(x, ids).exp()).mean(),
    "z-loss": lambda x, ids: F.cross_entropy(x.flatten(0, 1), ids.flatten()) + 1e-2 * x.logsumexp(-1).square().mean(),
    "temperature": lambda x, ids: F.cross_entropy((x / x.new_tensor(0.7)).flatten(0, 1), ids.flatten()),
    "written to": lambda x, ids: F.cross_entropy((x * 1).div_(2.0).flatten(0, 1), ids.flatten()),
    "written to at once": lambda x, ids: F.cross_entropy(x.div_(0.7).flatten(0, 1), ids.flatten()),
    "norms": lambda x, ids: x.norm(dim=-1).sum(),
    "top-k": lambda x, ids: (x / 2).topk(3, -1).values.sum(),
    "maximum": lambda x, ids: x.max(-1).values.sum() + x.amax(-1).square().mean(),
    "last token": lambda x, ids: F.cross_entropy(x[:, -1], ids[:, 0]),
    "squares": lambda x, ids: x.square().mean() + F.mse_loss(x, torch.zeros_like(x)) + x.std(-1).sum(),
}
WHOLE: dict[str, Loss] = {
    "rows in another order": lambda x, ids: F.kl_div(x.log_softmax(-1), x.detach().flip(1).softmax(-1), reduction="batchmean"),
    "by index": lambda x, ids: x[torch.arange(ids.shape[0])[:, None], torch.arange(ids.shape[1])[None], ids].sum(),
    "by mask": lambda x, ids: F.cross_entropy(x[ids > 10], ids[ids > 10]),
    "token by token": lambda x, ids: torch.stack([F.cross_entropy(x[:, t], ids[:, t]) for t in range(0, x.shape[1], 9)]).sum(),
    "in the user's chunks": lambda x, ids: torch.stack(
        [
            F.cross_entropy(a.flatten(0, 1), b.flatten(), reduction="sum")
            for a, b in zip(x.split(9, 1), ids.split(9, 1), strict=True)
        ]
    ).sum(),
    "one-hot": lambda x, ids: -(F.one_hot(ids, x.shape[-1]) * x.log_softmax(-1)).sum(-1).mean(),
    "dropout": lambda x, ids: F.cross_entropy(F.dropout(x, 0.0).flatten(0, 1), ids.flatten()),
}
