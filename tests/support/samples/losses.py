"""Sample calls of losses."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.samples.registry import Sizes, sample

aten = torch.ops.aten


@sample(aten.nll_loss_forward.default)
def likelihood_of_each(s: Sizes) -> tuple[Any, ...]:
    return s.draw(s.t, s.v), s.integers(s.v, s.t), None, 0, -100


@sample(aten.nll_loss_forward.default)
def summed_likelihood(s: Sizes) -> tuple[Any, ...]:
    return s.draw(s.t, s.v), s.integers(s.v, s.t), s.positive(s.v), 2, 0


@sample(aten.nll_loss_forward.default)
def mean_likelihood(s: Sizes) -> tuple[Any, ...]:
    return s.draw(s.t, s.v), s.integers(s.v, s.t), None, 1, -100


@sample(aten.nll_loss_backward.default)
def summed_likelihood_backward(s: Sizes) -> tuple[Any, ...]:
    return s.draw(), s.draw(s.t, s.v), s.integers(s.v, s.t), s.positive(s.v), 2, 0, s.positive()


@sample(aten.nll_loss_backward.default)
def likelihood_of_each_backward(s: Sizes) -> tuple[Any, ...]:
    return s.draw(s.t), s.draw(s.t, s.v), s.integers(s.v, s.t), None, 0, -100, s.positive()


@sample(aten.nll_loss_backward.default)
def mean_likelihood_backward(s: Sizes) -> tuple[Any, ...]:
    return s.draw(), s.draw(s.t, s.v), s.integers(s.v, s.t), None, 1, -100, s.positive()


@sample(aten.nll_loss2d_forward.default)
def likelihood_2d(s: Sizes) -> tuple[Any, ...]:
    return s.draw(s.b, s.v, 1, s.t), s.integers(s.v, s.b, 1, s.t), None, 0, -100


@sample(aten.nll_loss2d_forward.default)
def summed_likelihood_2d(s: Sizes) -> tuple[Any, ...]:
    return s.draw(s.b, s.v, s.k, s.t), s.integers(s.v, s.b, s.k, s.t), s.positive(s.v), 2, 0


@sample(aten.nll_loss2d_backward.default)
def summed_likelihood_2d_backward(s: Sizes) -> tuple[Any, ...]:
    return s.draw(), s.draw(s.b, s.v, 1, s.t), s.integers(s.v, s.b, 1, s.t), None, 2, -100, s.positive()


@sample(aten.nll_loss2d_backward.default)
def likelihood_2d_backward(s: Sizes) -> tuple[Any, ...]:
    return s.draw(s.b, 1, s.t), s.draw(s.b, s.v, 1, s.t), s.integers(s.v, s.b, 1, s.t), None, 0, -100, s.positive()
