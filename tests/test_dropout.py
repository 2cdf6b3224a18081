"""Dropout: one seed gives one sample, the share is as requested, and gradients match the sampled mask."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support import decoders
from tests.support.exactness import check_streamed, recorder
from tests.support.peaks import however_small
from tests.support.spread import only
from tests.support.twins import batch, compiled, gradients

pytestmark = pytest.mark.compiled


def drop(x: Tensor, training: bool) -> Tensor:
    return F.dropout(x, 0.3, training)


class KernelHeads(decoders.Heads):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.3 if self.training else 0.0, is_causal=True)


class DroppedHeads(decoders.Heads):
    """Dropout before and after the kernel, whose result has other strides than the projections."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return drop(super().mix(*(drop(heads, self.training) for heads in (q, k, v))), self.training)


class UnfusedHeads(decoders.UnfusedHeads):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = self.mask(q @ k.transpose(-2, -1) / decoders.HEAD**0.5)
        return drop(torch.softmax(scores, dim=-1), self.training) @ v


class Dropped(decoders.Decoder):
    """Dropout on the residual branches, too."""

    attention: type[nn.Module] = DroppedHeads

    def hidden(self, x: Tensor, **more: Any) -> Tensor:
        for layer, norm in zip((self.attend[0], self.mlp[0], self.attend[1], self.mlp[1]), self.norms, strict=False):
            x = x + self.branch(layer, norm(x))
        return self.norms[-1](x)

    def branch(self, layer: nn.Module, x: Tensor) -> Tensor:
        return drop(layer(x), self.training)


class Unfused(Dropped):
    attention = UnfusedHeads


class InKernel(Dropped):
    attention = KernelHeads


class Checkpointed(Dropped):
    """The program's own checkpoints repeat their random numbers."""

    attention = KernelHeads

    def branch(self, layer: nn.Module, x: Tensor) -> Tensor:
        inner = layer if isinstance(layer, KernelHeads) else partial(super().branch, layer)
        return checkpoint(inner, x, use_reentrant=False)  # type: ignore[no-any-return]


CASES = [(Dropped, "projections"), (Dropped, "attention"), (Unfused, "auto"), (InKernel, "auto"), (Checkpointed, "auto")]


@pytest.mark.parametrize(("kind", "save"), only(CASES[:2], CASES))
def test_gradients_match_the_sampled_dropout_mask(kind: type[nn.Module], save: str) -> None:
    """And a seed draws one sample: the same bits, and others under another."""
    own = decoders.made(kind)
    function, backend = compiled(own, save=save)
    check_gradient(own, function)
    steps = []
    for seed in (1, 1, 2):
        own.zero_grad(set_to_none=True)
        torch.manual_seed(seed)
        loss = function(**batch())
        loss.backward()
        steps.append([loss.detach(), *gradients(own).values()])
    first, second, other = steps
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True) if one is not None and two is not None)
    assert not torch.equal(first[0], other[0])  # type: ignore[arg-type]
    check_streamed(backend.facts, True, {"causal"})


def test_gradients_of_an_unchunked_graph_match_the_sampled_mask() -> None:
    """Its halves save states of random numbers for the checkpoints of the program."""
    own = decoders.made(Checkpointed)
    backend = recorder(bodies="eager")
    torch._dynamo.reset()
    with however_small():
        check_gradient(own, torch.compile(own, backend=backend))
    assert [facts.unchunked_reason is not None for facts in backend.facts] == [True]


def check_gradient(own: nn.Module, function: Callable[..., Tensor]) -> None:
    """Against finite differences of the compiled function itself, under one seed."""

    def loss() -> Tensor:
        torch.manual_seed(3)
        return function(**batch())

    loss().backward()
    step = 1e-6
    for parameter in own.parameters():
        assert parameter.grad is not None
        direction = torch.randn_like(parameter) / parameter.numel() ** 0.5
        sides = []
        for alpha in (step, -2 * step, step):
            with torch.no_grad():
                parameter.add_(direction, alpha=alpha)
            sides.append(float(loss().detach()))
        assert (sides[0] - sides[1]) / (2 * step) == pytest.approx(float((parameter.grad * direction).sum()), rel=1e-5, abs=1e-8)


def test_dropout_drops_the_requested_share_independently_per_chunk() -> None:
    """A third of the elements are dropped, the others scaled; rows of different chunks are not dropped alike."""

    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x * 1.0, 0.3, True)

    x = torch.ones(2, 60, 64, dtype=torch.float64, requires_grad=True)
    function, _ = compiled(Noise(), chunk_size=6)
    out = function(x)
    out.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, out)  # the gradient of x is the mask, and x is one
    kept = (out != 0).double()
    assert out.unique().tolist() == [0.0, pytest.approx(1 / 0.7)]
    assert float(kept.mean()) == pytest.approx(0.7, abs=0.02)
    chunks = kept[0].view(10, 6, 64)
    assert all(not torch.equal(chunks[i], chunks[j]) for i in range(10) for j in range(i))


def test_random_values_between_loops_equal_eager() -> None:
    """Rotations that hash rows have no rows of their own: nothing else is drawn, and under the same seed they are eager's."""

    def function(x: Tensor) -> Tensor:
        rotated: Tensor = x @ torch.randn(x.shape[-1], 5, dtype=x.dtype)
        return F.scaled_dot_product_attention(rotated, rotated, x, is_causal=True).square().mean()

    x = torch.randn(2, 17, 6, dtype=torch.float64)
    found = []
    for call in (function, torch.compile(function, backend="streambp", options={"chunk_size": 4})):
        torch.manual_seed(3)
        own = x.clone().requires_grad_()
        call(own).backward()
        found.append(own.grad)
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-14)
