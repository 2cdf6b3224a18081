"""One row among all: a loss on the last token, a summary taken from the first. The chunk that holds it makes it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.decoders.fused import Plain
from tests.support.decoders.parts import VOCABULARY, made
from tests.support.exactness import compare
from tests.support.spread import only

LENGTH = 19
Use = Callable[["Single", Tensor, Tensor], Tensor]


class Single(Plain):
    """A causal decoder whose loss is `use` of its last hidden states [b t d]."""

    use: Use

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return type(self).use(self, self.hidden(self.embed(ids)), labels)


def last_label(model: Single, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model.head(x[:, -1]), labels[:, -1])


def last_label_kept_as_a_row(model: Single, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model.head(x[:, -1:]).flatten(0, 1), labels[:, -1])


def last_logits(model: Single, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model.head(x)[:, -1], labels[:, -1])


def reward_margin(model: Single, x: Tensor, labels: Tensor) -> Tensor:
    rewards = model.head(x)[:, -1, 0]
    return -F.logsigmoid(rewards[0] - rewards[1])


def first_row_for_all(model: Single, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model.head(x + x[:, :1]).flatten(0, 1), labels.flatten())


def two_rows_and_all(model: Single, x: Tensor, labels: Tensor) -> Tensor:
    summary = x[:, 3] * x[:, -2].tanh()
    return F.cross_entropy(model.head(x * summary.unsqueeze(1)).flatten(0, 1), labels.flatten())


def time_first(model: Single, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model.head(x.transpose(0, 1)[-1]), labels.t()[-1])


USES = (last_label, last_label_kept_as_a_row, last_logits, reward_margin, first_row_for_all, two_rows_and_all, time_first)


@pytest.mark.parametrize(
    "use", only((last_label_kept_as_a_row, first_row_for_all, two_rows_and_all, time_first), USES), ids=lambda use: use.__name__
)
def test_single_rows_stream(use: Use) -> None:
    model = made(type("Used", (Single,), {"use": staticmethod(use)}))
    generator = torch.Generator().manual_seed(5)
    ids, labels = torch.randint(0, VOCABULARY, (2, 2, LENGTH), generator=generator)
    compare(model, {"ids": ids, "labels": labels}, chunk_size=5, also=(1, 7, LENGTH), attention={"causal"})


@pytest.mark.parametrize("kept", [False, True])
def test_signs_of_a_row_that_is_zero(kept: bool) -> None:
    """A sum over chunks would lose them; the last rows here are zeros of both signs."""

    def signs(model: Single, x: Tensor, labels: Tensor) -> Tensor:
        shown = x * (torch.arange(x.shape[1]) < x.shape[1] - 1).to(x.dtype)[:, None]
        last = shown[:, -1:] if kept else shown[:, -1].unsqueeze(1)
        signed = torch.copysign(model.head.weight.mean(0), last)
        return F.cross_entropy(model.head(shown + signed).flatten(0, 1), labels.flatten())

    model = made(type("Used", (Single,), {"use": staticmethod(signs)}))
    generator = torch.Generator().manual_seed(5)
    ids, labels = torch.randint(0, VOCABULARY, (2, 2, LENGTH), generator=generator)
    compare(model, {"ids": ids, "labels": labels}, chunk_size=5, also=(1, LENGTH), attention={"causal"})


def test_complex_rows_keep_both_parts() -> None:
    """A complex sum with a factor, even of one, mixes them."""

    def phases(model: Single, x: Tensor, labels: Tensor) -> Tensor:
        phase = torch.complex(1 + x.exp(), x * 0.0)[:, -1].acos().imag  # on the cut of acos: the sign of zero decides
        return F.cross_entropy(model.head(x * (1 + phase[:, None])).flatten(0, 1), labels.flatten())

    model = made(type("Used", (Single,), {"use": staticmethod(phases)}))
    generator = torch.Generator().manual_seed(5)
    ids, labels = torch.randint(0, VOCABULARY, (2, 2, LENGTH), generator=generator)
    compare(model, {"ids": ids, "labels": labels}, chunk_size=5, also=(1, LENGTH), attention={"causal"})


def test_row_by_row_is_no_single_row() -> None:
    """A recurrence that takes every row of a value by itself, from the last on, would be a loop for each."""

    def recurrence(model: Single, x: Tensor, labels: Tensor) -> Tensor:
        state, states = torch.zeros_like(x[:, 0]), []
        for step in reversed(range(x.shape[1])):
            state = torch.tanh(state + x[:, step])
            states.append(state)
        return F.cross_entropy(model.head(torch.stack(states[::-1], 1)).flatten(0, 1), labels.flatten())

    model = made(type("Used", (Single,), {"use": staticmethod(recurrence)}))
    ids, labels = torch.randint(0, VOCABULARY, (2, 2, 9), generator=torch.Generator().manual_seed(5))
    report = compare(model, {"ids": ids, "labels": labels}, chunk_size=4, streams=False)
    assert any("select" in reason for reason in report.facts[0].reasons())
