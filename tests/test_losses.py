"""Promise one, for losses: each is traced as the user wrote it, and streams with exact gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamfx.ir.facts import known
from tests.support import decoders, hf, layouts
from tests.support.exactness import compare
from tests.support.spread import only, spread

LENGTH = 13
Loss: TypeAlias = "Callable[[Tensor, Tensor], Tensor]"


class WithLoss(nn.Module):
    """A decoder and a loss on its logits [B, T, V] and labels [B, T]."""

    def __init__(self, loss: Loss, decoder: Callable[[], decoders.Decoder] = lambda: decoders.Plain(1)) -> None:
        super().__init__()
        self.decoder, self.loss = decoder(), loss

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.decoder.logits(ids), labels)


def flat(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return logits.flatten(0, 1), labels.flatten()


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(*flat(logits, labels), reduction="none").view_as(labels)


def label_smoothing(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(*flat(logits, labels), label_smoothing=0.1)


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(*flat(logits, labels), reduction="sum")


def summed_over_a_count(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(*flat(logits, labels), reduction="sum") / (labels != layouts.IGNORED).sum()


def per_token_then_mean(logits: Tensor, labels: Tensor) -> Tensor:
    kept = labels != layouts.IGNORED
    return (token_losses(logits, labels) * kept).sum() / kept.sum()


def mean_of_row_means(logits: Tensor, labels: Tensor) -> Tensor:
    kept = (labels != layouts.IGNORED).to(logits.dtype)
    return ((token_losses(logits, labels) * kept).sum(1) / kept.sum(1).clamp(min=1)).mean()


def weighted_by_position(logits: Tensor, labels: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 2, labels.shape[1], dtype=logits.dtype)
    return (token_losses(logits, labels) * weight).sum()


def class_weights(logits: Tensor, labels: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 2, logits.shape[-1], dtype=logits.dtype)
    return F.cross_entropy(*flat(logits, labels), weight=weight)


def class_weights_and_smoothing(logits: Tensor, labels: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 2, logits.shape[-1], dtype=logits.dtype)
    return F.cross_entropy(*flat(logits, labels), weight=weight, label_smoothing=0.2)


def z_loss(logits: Tensor, labels: Tensor) -> Tensor:
    kept = labels != layouts.IGNORED
    return F.cross_entropy(*flat(logits, labels)) + 1e-2 * logits.logsumexp(-1)[kept.nonzero(as_tuple=True)].pow(2).mean()


def z_loss_on_all(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(*flat(logits, labels)) + 1e-2 * logits.logsumexp(-1).pow(2).mean()


def classes_second(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), labels)


def classes_second_summed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="sum")


def classes_second_none(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none").pow(2).mean()


def shifted_logits(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(*flat(logits[:, :-1], labels[:, 1:]))


def padded_labels(logits: Tensor, labels: Tensor) -> Tensor:
    """How transformers shift: the labels are padded at the end, the logits stay whole."""
    return F.cross_entropy(*flat(logits, F.pad(labels, (0, 1), value=layouts.IGNORED)[:, 1:].contiguous()))


def softcapped(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(*flat(2 * torch.tanh(logits / 2), labels))


def in_log_softmax_and_gather(logits: Tensor, labels: Tensor) -> Tensor:
    kept = labels != layouts.IGNORED
    chosen = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    return -(chosen * kept).sum() / kept.sum()


def in_logsumexp(logits: Tensor, labels: Tensor) -> Tensor:
    kept = labels != layouts.IGNORED
    chosen = logits.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    return ((logits.logsumexp(-1) - chosen) * kept).sum() / kept.sum()


def sequence_log_probability(logits: Tensor, labels: Tensor) -> Tensor:
    """Not a sum over tokens: a non-linear function of sums per row, as preference losses are."""
    kept = labels != layouts.IGNORED
    chosen = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    totals = (chosen * kept).sum(1)
    return -F.logsigmoid(0.1 * (totals[0] - totals[1]))


def focal(logits: Tensor, labels: Tensor) -> Tensor:
    losses = token_losses(logits, labels)
    return ((1 - torch.exp(-losses)) ** 2 * losses).sum() / (labels != layouts.IGNORED).sum()


def squared_total(logits: Tensor, labels: Tensor) -> Tensor:
    return summed(logits, labels).pow(2)


def three_tokens_ahead(logits: Tensor, labels: Tensor) -> Tensor:
    """Multi-token prediction: whole chunks have no label."""
    return F.cross_entropy(*flat(logits[:, :-3], labels[:, 3:])) + F.cross_entropy(*flat(logits[:, :-1], labels[:, 1:]))


def shifted_by_padding(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(*flat(F.pad(logits, (0, 0, 3, 0))[:, : labels.shape[1]], labels))


def probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    """Each class is a yes or no of its own."""
    target = F.one_hot(labels.clamp(min=0), logits.shape[-1]).to(logits.dtype)
    return F.binary_cross_entropy(logits.sigmoid(), target)


def yes_or_no(logits: Tensor, labels: Tensor) -> Tensor:
    target = (labels[..., None] == torch.arange(logits.shape[-1])).to(logits.dtype)
    return F.binary_cross_entropy_with_logits(logits, target)


def squared(logits: Tensor, labels: Tensor) -> Tensor:
    return F.mse_loss(logits, torch.ones_like(logits))


def huber(logits: Tensor, labels: Tensor) -> Tensor:
    return F.huber_loss(logits, torch.ones_like(logits), delta=0.5) + F.smooth_l1_loss(logits, torch.ones_like(logits))


def absolute(logits: Tensor, labels: Tensor) -> Tensor:
    return F.l1_loss(logits, torch.ones_like(logits))


def two_terms(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(*flat(logits, labels)) + 0.3 * F.mse_loss(logits, torch.zeros_like(logits))


def entropy_bonus(logits: Tensor, labels: Tensor) -> Tensor:
    logp = logits.log_softmax(-1)
    return F.nll_loss(*flat(logp, labels)) + 0.01 * (logp.exp() * logp).sum(-1).mean()


def distillation(logits: Tensor, labels: Tensor) -> Tensor:
    teacher = torch.linspace(-1, 1, logits.shape[-1], dtype=logits.dtype).expand_as(logits)
    return F.kl_div(logits.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="batchmean")


LOSSES: dict[str, Loss] = {
    function.__name__: function
    for function in (
        label_smoothing,
        summed,
        summed_over_a_count,
        per_token_then_mean,
        mean_of_row_means,
        weighted_by_position,
        class_weights,
        class_weights_and_smoothing,
        z_loss_on_all,
        classes_second,
        classes_second_summed,
        classes_second_none,
        shifted_logits,
        padded_labels,
        softcapped,
        in_log_softmax_and_gather,
        in_logsumexp,
        sequence_log_probability,
        focal,
        squared_total,
        three_tokens_ahead,
        shifted_by_padding,
        probabilities,
        yes_or_no,
        squared,
        huber,
        absolute,
        two_terms,
        entropy_bonus,
        distillation,
    )
}


def batch(batch: int = 2, length: int = LENGTH) -> dict[str, Tensor]:
    """Labels with holes."""
    labels = layouts.tokens(decoders.VOCABULARY, batch, length, seed=1)
    labels[0, 2:5], labels[-1, -1] = layouts.IGNORED, layouts.IGNORED
    return {"ids": layouts.tokens(decoders.VOCABULARY, batch, length), "labels": labels}


LIKE_OTHER_SIZES = [
    (rows, length, name)
    for rows, length in ((7, 7), (2, decoders.WIDTH), (2, decoders.VOCABULARY))
    for name in ("label_smoothing", "mean_of_row_means", "classes_second", "in_logsumexp")
][::-1]


@pytest.mark.parametrize("name", spread(LOSSES, 3))
def test_losses(name: str) -> None:
    compare(decoders.made(lambda: WithLoss(LOSSES[name])), batch(), chunk_size=5, also=(1, 16), attention={"causal"})


@pytest.mark.parametrize(("rows", "length", "name"), spread(LIKE_OTHER_SIZES, 5))
def test_losses_at_lengths_like_other_sizes(rows: int, length: int, name: str) -> None:
    compare(decoders.made(lambda: WithLoss(LOSSES[name])), batch(rows, length), chunk_size=5, also=(1,), attention={"causal"})


def test_selected_tokens() -> None:
    """Rows chosen by a data-dependent index: that cannot stream, and stays exact."""
    torch._dynamo.config.capture_dynamic_output_shape_ops = False
    compare(decoders.made(lambda: WithLoss(z_loss)), batch(), chunk_size=5, streams=None, graphs=None)


def test_losses_per_token_leave_the_graph() -> None:
    """reduction="none" as the result: the incoming gradient has a number per token."""
    compare(decoders.made(lambda: WithLoss(token_losses)), batch(), chunk_size=5, also=(1, 16), attention={"causal"})


def test_mse_on_hidden_states() -> None:
    class Regression(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = decoders.Plain(1)

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return F.mse_loss(self.decoder.hidden(x), target)

    shape = (2, LENGTH, decoders.WIDTH)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    target = torch.randn(shape, dtype=torch.float64)
    compare(decoders.made(Regression), (x, target), chunk_size=5, also=(1, 16), attention={"causal"})


def test_loss_on_the_last_token() -> None:
    """A classifier: one row of the sequence is taken out."""

    class Classifier(decoders.Plain):
        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(self.head(self.hidden(self.embed(ids))[:, -1]), labels[:, -1])

    compare(
        decoders.made(lambda: Classifier(2)),
        {**batch(), "labels": batch()["ids"]},
        chunk_size=5,
        also=(1, 16),
        attention={"causal"},
        streams=None,
    )


class LastState(nn.Module):
    """The loss sees running sums behind the last row, three of each channel, beside the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(23, 8), nn.Linear(8, 23, bias=False)
        self.out, self.wide = nn.Linear(8, 8), nn.Parameter(torch.randn(3))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        sums = (self.out(x).tanh().unsqueeze(-1) * self.wide).cumsum(1)
        x = x + self.out((sums * self.wide).sum(-1))
        return F.cross_entropy(*flat(self.head(x), labels)) + sums[:, -1].square().mean()


def test_of_the_last_state_no_gradient_is_kept_that_is_as_long_as_all_rows() -> None:
    """It is that of one row, among zeros: the backward half puts it there. Of the head the gradient of its rows is kept."""
    ids = layouts.tokens(23, 2, LENGTH, 0)
    report = compare(decoders.made(LastState), {"ids": ids, "labels": ids}, chunk_size=4, also=(1, LENGTH))
    program = known(report.facts[0].program)
    assert program.backward is not None
    taken = [node.meta["val"] for node in program.backward.graph.find_nodes(op="placeholder")]
    assert max(item.numel() for item in taken if item.is_floating_point() and item.shape != (23, 8)) <= 2 * LENGTH * 8


def test_mean_pooling() -> None:
    class Pooled(decoders.Plain):
        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(self.head(self.hidden(self.embed(ids)).mean(1)), labels[:, 0])

    compare(decoders.made(lambda: Pooled(2)), batch(), chunk_size=5, also=(1, 16), attention={"causal"})


def test_loss_outside_of_the_compiled_graph() -> None:
    """Logits leave the graph, and the loss is computed by the caller."""

    class Logits(decoders.Plain):
        def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]
            return self.logits(ids)

    given = batch()
    compare(
        decoders.made(Logits),
        {"ids": given["ids"]},
        chunk_size=5,
        also=(1, 16),
        attention={"causal"},
        reduce=lambda logits: label_smoothing(logits, given["labels"]),
    )


def test_loss_inside_and_logits_outside() -> None:
    """Both carry a gradient."""
    ids = layouts.tokens(decoders.VOCABULARY, 2, LENGTH)
    model = decoders.made(lambda: decoders.NanoGPT(1))
    compare(
        model,
        {"ids": ids, "targets": ids},
        chunk_size=5,
        also=(1, 16),
        attention={"causal"},
        reduce=lambda out: out[1] + 0.1 * out[0].pow(2).mean(),
    )


@pytest.mark.parametrize("attention", only(["eager"], ["sdpa", "eager"]))
def test_num_items_in_batch(attention: str) -> None:
    """What transformers' trainer passes for gradient accumulation: the sum over tokens is divided by it."""
    inputs = layouts.prompt_masked(layouts.tokens(hf.VOCABULARY, 2, LENGTH))
    compare(hf.made("llama", attention), {**inputs, "num_items_in_batch": torch.tensor(17)}, also=(1, 16), attention={"causal"})


def test_hidden_states_and_logits_of_a_huggingface_model() -> None:
    inputs = layouts.plain(layouts.tokens(hf.VOCABULARY, 2, LENGTH))
    model = hf.made("llama")
    compare(model, {**inputs, "output_hidden_states": True}, also=(1, 16), streams=None, graphs=None)
