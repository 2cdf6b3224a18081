"""Assertions about data, by user code or by torch, hold in the streamed program, too."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.decoders.parts import VOCABULARY
from tests.support.exactness import compare
from tests.support.spread import only
from tests.support.used import Use, Used, batch, labelled, used

pytestmark = pytest.mark.compiled


class Checked(torch.autograd.Function):
    """A function that asserts something about its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, labels: Tensor) -> Tensor:
        ctx.save_for_backward(labels)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (labels,) = ctx.saved_tensors
        torch._assert_async(gradient.isfinite().all() & (labels >= 0).all(), "bad gradient")
        return gradient * 1.0, None


def asserted(check: Callable[[Tensor, Tensor], Tensor]) -> Use:
    def loss(model: Used, x: Tensor, labels: Tensor) -> Tensor:
        torch._assert_async(check(x, labels), "negative")
        return labelled(model, x, labels.relu())

    return loss


def by_index(model: Used, x: Tensor, labels: Tensor) -> Tensor:
    """One row of each sequence."""
    last = torch.where((labels < 0).any(1), x.shape[1], labels[:, 0])
    return model.head(x)[torch.arange(len(x)), last].square().mean()


LOSSES: dict[str, Use] = {
    "a sum": asserted(lambda x, labels: (labels >= 0).sum() == labels.numel()),
    "activations": asserted(lambda x, labels: ((x.square().sum(-1) < 1e6) & (labels >= 0)).all()),
    "gradients": lambda model, x, labels: labelled(model, Checked.apply(x, labels), labels.relu()),
    "classes": lambda model, x, labels: -(F.one_hot(labels, VOCABULARY) * model.head(x).log_softmax(-1)).sum(-1).mean(),
    "rows": by_index,
    "probabilities": lambda model, x, labels: F.binary_cross_entropy(
        model.head(x)[..., 0].sigmoid(), labels.double() / VOCABULARY
    ),
}


def classes_are_checked() -> bool:
    """Return whether a compiled `one_hot` refuses negative numbers: graphs of torch 2.11 do not assert it."""
    try:
        torch.compile(lambda labels: F.one_hot(labels, VOCABULARY), backend="aot_eager")(-batch()["labels"])
    except RuntimeError:
        return True
    assert torch.__version__.startswith("2.11.")
    return False


@pytest.mark.parametrize("name", only(["a sum", "gradients", "classes"], LOSSES))
def test_a_failed_assertion_raises_and_the_rest_streams(name: str) -> None:
    model, good = used(LOSSES[name]), batch()
    compare(model, good, chunk_size=4, also=(7,), streams=True if name in ("a sum", "classes") else None)
    torch._dynamo.reset()
    function = torch.compile(model, backend="streambp", options={"chunk_size": 4, "bodies": "eager"})
    function(**good).backward()
    wrong = good["labels"].clone()
    wrong[0, 3] = -1
    with pytest.raises(RuntimeError) if name != "classes" or classes_are_checked() else nullcontext():
        function(good["ids"], wrong).backward()
    function(**good).backward()
