"""A step reads buffers and then writes to them: the backward half uses the values before the write."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.decoders.parts import WIDTH, made
from tests.support.exactness import compare
from tests.support.used import Used, batch, labelled

pytestmark = pytest.mark.compiled

LENGTH = 21


class Written(Used):
    """A decoder that reads and writes buffers and a weight that is not trained."""

    def __init__(self, step: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__(lambda own, x, labels: labelled(own, x + own.attend[0](own.norms[0](step(own, x))), labels))
        self.code, self.cache = nn.Buffer(torch.randn(WIDTH, WIDTH)), nn.Buffer(torch.zeros(2, 2 * LENGTH, WIDTH))
        self.count, self.norm = nn.Buffer(torch.zeros((), dtype=torch.int64)), nn.BatchNorm1d(WIDTH)
        self.mean = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)


def averaged(own: Written, x: Tensor) -> Tensor:
    y = x @ own.code.clone()
    with torch.no_grad():
        own.code.mul_(0.9).add_((x.transpose(1, 2) @ x).mean(0), alpha=0.1)
    return y + x @ own.code


def cached(own: Written, x: Tensor) -> Tensor:
    seen = x * own.cache[:, :LENGTH].clone()
    own.cache[:, :LENGTH] = x.detach()
    return x + seen + (x @ own.cache.transpose(1, 2)) @ own.cache


def averaged_weight(own: Written, x: Tensor) -> Tensor:
    y = x @ own.mean.clone()
    with torch.no_grad():
        own.mean.lerp_(own.head.weight[:WIDTH], 0.1)
    return y


def counted(own: Written, x: Tensor) -> Tensor:
    y = own.norm((x * (own.count + 1)).flatten(0, 1)).view_as(x)
    own.count.add_(1)
    return y


@pytest.mark.parametrize("step", [averaged, cached, averaged_weight, counted], ids=lambda step: step.__name__)
def test_the_backward_half_has_the_values_before_a_write(step: Callable[[Written, Tensor], Tensor]) -> None:
    compare(made(lambda: Written(step)), batch(LENGTH), chunk_size=8, streams=None)
