"""Sample calls of convolutions over one axis, and over several whose kernel has one tap."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tests.support.samples.registry import Sample, Sizes, sample

aten = torch.ops.aten


def convolutions(s: Sizes) -> Iterator[tuple[Any, ...]]:
    """(x, weight, bias?, options): over t rows in steps of one."""
    x, taps = s.draw(s.b, s.d, s.t), 3
    per_channel, mixing, turned = s.draw(s.d, 1, taps), s.draw(s.k, s.d, taps), s.draw(s.d, s.k, taps)
    causal, dilated, grouped = [taps - 1], 2 * (taps - 1), s.draw(2 * s.d, s.k, 1, taps).flatten(1, 2)
    yield x, per_channel, s.draw(s.d), [1], causal, [1], False, [0], s.d
    yield x, mixing, s.draw(s.k), [1], causal, [1], False, [0], 1
    yield x, mixing, None, [1], [1], [1], False, [0], 1
    yield x, per_channel, None, [1], [dilated], [2], False, [0], s.d
    yield x, turned, s.draw(s.k), [1], [0], [2], True, [0], 1
    yield s.draw(s.b, s.d, s.t + 1), per_channel, None, [1], [1], [1], True, [0], s.d
    yield s.draw(s.b, 2 * s.d, s.t), s.draw(2 * s.k, s.d, taps), None, [1], causal, [1], False, [0], 2
    yield s.draw(s.b, 2 * s.d, s.t + 2), grouped, None, [1], causal, [1], True, [0], 2
    yield s.draw(s.b, s.d, s.t + 4), mixing, None, [1], [0], [1], False, [0], 1
    yield s.draw(s.b, s.d, s.t, s.k), s.draw(s.v, s.d, 1, 1), s.draw(s.v), [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    yield s.draw(s.b, s.d, s.t, s.k), s.draw(s.d, 1, 1, 1), None, [1, 1], [0, 0], [1, 1], False, [0, 0], s.d
    yield s.draw(s.b, s.d, s.t), s.draw(s.d, s.v, 1), None, [1], [0], [1], True, [0], 1

    yield s.draw(s.b, s.d, s.t), s.draw(s.k, s.d, 1), None, [1], [1], [1], False, [0], 1
    yield s.draw(s.b, s.d, s.t + 2), s.draw(s.d, s.k, 1), None, [1], [1], [1], True, [0], 1


def of_weight(s: Sizes, number: int) -> tuple[Any, ...]:
    x, weight, _, *others = list(convolutions(s))[number]
    y = aten.convolution(x, weight, None, *others)
    return s.draw(*y.shape), x, weight, None, *others, [False, True, False]


def convolved(number: int) -> Sample:
    return lambda s: list(convolutions(s))[number]


def of_weight_number(number: int) -> Sample:
    return lambda s: of_weight(s, number)


for number in range(14):
    sample(aten.convolution.default)(convolved(number))
    sample(aten.convolution_backward.default)(of_weight_number(number))
