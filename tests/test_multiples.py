"""Gradients that are homogeneous in a number per sequence are computed with the loss; all others in a second pass."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from streamfx.ir.facts import Facts
from tests.support.spread import only
from tests.support.tables import read
from tests.support.tracing import compare_function, take_gradients, traced

WIDTH, VOCABULARY, LENGTH = 4, 7, 6
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)


LOSSES = read(Path(__file__).parent / "support" / "passes_of_losses.txt", 2)
ONE, TWO = dict(LOSSES["one"]), dict(LOSSES["two"])  # type: ignore[arg-type]


class Bent(torch.autograd.Function):
    """The identity, with a nonlinear gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.tanh(gradients[0])


def loss_of(made: str, x: Tensor, weight: Tensor, labels: Tensor, keep: Tensor) -> Tensor:
    """A loss of `passes_of_losses.txt`."""

    def logits() -> Tensor:
        return x @ weight

    def logps(of: Tensor | None = None) -> Tensor:
        return (logits() if of is None else of).log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)

    def sums() -> Tensor:
        return (logps() * keep).sum(1)

    def squares(rows: Tensor) -> Tensor:
        return rows.sum(1).square().mean()

    result: Tensor = eval(made, {**globals(), **locals(), "rows": torch.arange(len(labels))})
    return result


def after_attention(made: str) -> Callable[..., Tensor]:
    def function(x: Tensor, w: Tensor, *others: Tensor) -> Tensor:
        q = (x @ w)[:, None]
        x = x + F.scaled_dot_product_attention(q, q, x[:, None], is_causal=True)[:, 0] @ w
        return loss_of(made, x, *others)

    return function


def operands(batch: int, length: int, trained: bool) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = (batch, length, WIDTH), (WIDTH, WIDTH), (WIDTH, VOCABULARY)
    tensors = [torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in shapes]
    labels = torch.randint(0, VOCABULARY, (batch, length), generator=draw)
    keep = (torch.rand(batch, length, generator=draw) < 0.7).double()
    return [*(item.requires_grad_(i < 2 or trained) for i, item in enumerate(tensors)), labels, keep]


def is_one_pass(made: str, batch: int = 4, length: int = LENGTH, trained: bool = False) -> bool:
    """Whether the backward has no matmul with the vocabulary; the gradients are eager's."""
    return in_one_pass(compare_function(after_attention(made), operands(batch, length, trained), (3, 1, 4), streams=None))


def in_one_pass(facts: Facts) -> bool:
    last = facts.stages[-1]
    products = [node for node in facts.joint.nodes if node.target in PRODUCTS and VOCABULARY in _sizes(node)]
    own = {*last.forward, *last.backward}
    return bool(last.gradient_in_forward) and bool(products) and all(node in own for node in products)


def _sizes(node: Any) -> set[int]:
    return {size for item in (node, *node.all_input_nodes) for size in item.meta["val"].shape}


SOME = ("preferences", "selected", "filled if there is any", "some with zero gradients")


@pytest.mark.parametrize("name", only(SOME, ONE))
def test_one_pass(name: str) -> None:
    assert is_one_pass(ONE[name])


@pytest.mark.parametrize("name", only(["time first"], ["preferences", "time first"]))
@pytest.mark.parametrize("batch", [LENGTH, WIDTH, 2])
def test_batches_as_long_as_the_sequence(name: str, batch: int) -> None:
    assert is_one_pass(ONE[name], batch, length=batch)


def test_a_trained_head_runs_in_two_passes() -> None:
    assert not is_one_pass(ONE["preferences"], trained=True)


@pytest.mark.parametrize("trained", [False, True])
def test_one_number_scales_weights_as_well(trained: bool) -> None:
    assert is_one_pass("sums().sum().square()", trained=trained)
    assert is_one_pass("sums()[0].square()", batch=1, trained=trained)


@pytest.mark.parametrize("name", only(["normed over the batch", "rolled", "two terms", "selected twice"], TWO))
@pytest.mark.parametrize("batch", [4, pytest.param(LENGTH, marks=pytest.mark.long)])
def test_two_passes(name: str, batch: int) -> None:
    assert not is_one_pass(TWO[name], batch)


@pytest.mark.parametrize("batch", [4, LENGTH])
def test_sequences_that_are_mixed_before_the_head_are_exact(batch: int) -> None:
    is_one_pass("squares(logps((x + x.mean(0, keepdim=True)) @ weight))", batch)


def test_an_infinite_cotangent_scale() -> None:
    """Gradients that it reaches are NaN in eager and here; other sequences have finite ones."""
    infinite = "((rows == 0) * 1e4 * -(s := sums())).exp().sum() + s.square().sum()"
    tensors, function = operands(3, LENGTH, False), after_attention(infinite)
    tensors[-1].fill_(1)
    function(*tensors).backward()
    wanted = take_gradients(tensors)
    recorded, _ = traced(function, tensors, chunk_size=3, loss_chunk_size=2)
    found = take_gradients(tensors)
    assert in_one_pass(recorded.facts[-1]) and not wanted["0"].isfinite().all()  # type: ignore[union-attr]
    for name in wanted:
        assert torch.equal(found[name].isfinite(), wanted[name].isfinite())  # type: ignore[union-attr]
    torch.testing.assert_close(found["0"][1:], wanted["0"][1:], rtol=1e-12, atol=1e-12)  # type: ignore[index]
