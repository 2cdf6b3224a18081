"""Sample calls of views, and of operators that only move elements."""

from __future__ import annotations

from typing import Any

import torch

from streamfx.runtime.rel_shift import RELATIVE_SHIFT, RELATIVE_SHIFT_BACKWARD
from tests.support.samples.registry import Sizes, sample

aten = torch.ops.aten


@sample(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.view_copy.default)
def merged(s: Sizes) -> tuple[Any, ...]:
    return s.draw(s.b, s.t, s.d), [s.b * s.t, s.d]


@sample(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.view_copy.default)
def split_apart(s: Sizes) -> tuple[Any, ...]:
    return s.draw(s.b * s.t, s.d * s.k), [s.b, s.t, s.d, s.k]


@sample(aten.view.default, aten.reshape.default)
def merged_inside(s: Sizes) -> tuple[Any, ...]:
    return s.draw(s.t, s.b, s.d, s.k), [s.t, s.b * s.d, 1, s.k]


@sample(aten.view.default, aten.reshape.default)
def all_in_one(s: Sizes) -> tuple[Any, ...]:
    return s.draw(s.b, s.t), [-1]


sample(aten.unsqueeze.default)(lambda s: (s.draw(s.b, s.t), 1))
sample(aten.unsqueeze.default)(lambda s: (s.draw(s.b, s.t), -1))
sample(aten.squeeze.default)(lambda s: (s.draw(s.b, 1, s.t),))
sample(aten.squeeze.dim)(lambda s: (s.draw(s.b, 1, s.t), 1))
sample(aten.squeeze.dim)(lambda s: (s.draw(s.b, 1, s.t), -1))
sample(aten.squeeze.dims)(lambda s: (s.draw(1, s.b, 1, s.t), [0, 2]))
sample(aten.squeeze.dims)(lambda s: (s.draw(1, s.b, 1, s.t), [0, 1]))
sample(aten.squeeze.dim)(lambda s: (s.draw(s.b, s.t), 1))
sample(aten.squeeze.dims)(lambda s: (s.draw(s.b, s.t, 1), [-2, 0]))
sample(aten.expand.default)(lambda s: (s.draw(s.b, 1, s.d), [s.b, s.t, s.d]))
sample(aten.expand.default)(lambda s: (s.draw(s.t, s.d), [s.b, -1, s.d]))
sample(aten.expand.default)(lambda s: (s.draw(), [s.b, s.t]))
sample(aten.permute.default)(lambda s: (s.draw(s.b, s.t, s.d), [1, -1, 0]))
sample(aten.transpose.int)(lambda s: (s.draw(s.b, s.t, s.d), 1, -1))
sample(aten.transpose.int)(lambda s: (s.draw(s.b, s.t, s.d), -3, 1))
sample(aten.t.default)(lambda s: (s.draw(s.t, s.d),))
sample(aten.t.default)(lambda s: (s.draw(s.t),))
sample(aten.select.int)(lambda s: (s.draw(s.b, s.t, s.d), 1, -1))
sample(aten.select.int)(lambda s: (s.draw(s.b, s.t, s.d), -1, 0))
sample(aten.slice.Tensor)(lambda s: (s.draw(s.b, s.t, s.d), 1, -1))
sample(aten.slice.Tensor)(lambda s: (s.draw(s.b, s.t, s.d), 1, 0, 1))
sample(aten.slice_backward.default)(lambda s: (s.draw(s.b, 1, s.d), [s.b, s.t, s.d], 1, s.t - 1, s.t, 1))
sample(aten.select_backward.default)(lambda s: (s.draw(s.b, s.d), [s.b, s.t, s.d], 1, s.t - 1))
sample(aten.diagonal.default)(lambda s: (s.draw(s.d, s.t, s.k, s.d), 0, -1, 0))
sample(aten.diagonal.default)(lambda s: (s.draw(s.d, s.t, s.k), 0, 0, 1))
sample(aten.diagonal.default)(lambda s: (s.draw(s.t, s.d, s.k), -1, 1, 2))
sample(aten.diagonal_backward.default)(lambda s: (s.draw(s.t, s.b, min(s.d, s.k)), [s.t, s.d, s.b, s.k], 0, 1, -1))
sample(aten.slice.Tensor)(lambda s: (s.draw(s.b, s.t, s.d), 1, 0, s.t - 1))
sample(aten.slice.Tensor)(lambda s: (s.draw(s.b, s.t, s.d), 1, 1, 9223372036854775807))
sample(aten.slice.Tensor)(lambda s: (s.draw(s.b, s.t + 3, s.d), -2, -3, -1))
sample(aten.slice.Tensor)(lambda s: (s.draw(s.b, s.t + 3, s.d), 1, 1, s.t + 3, 2))
sample(aten.slice_backward.default)(lambda s: (s.draw(s.b, s.t, s.d), [s.b, s.t + 1, s.d], 1, 0, s.t, 1))
sample(aten.slice_backward.default)(lambda s: (s.draw(s.b, s.t, s.d), [s.b, s.t + 3, s.d], 1, 2, s.t + 2, 1))
sample(aten.slice_backward.default)(lambda s: (s.draw(s.b, s.t, s.d), [s.b, s.t + 9, s.d], 1, 5, s.t + 5, 1))
sample(aten.slice_backward.default)(lambda s: (s.draw(s.b, s.t, s.d), [s.b, 2 * s.t, s.d], 1, 0, 2 * s.t, 2))
sample(aten.constant_pad_nd.default)(lambda s: (s.draw(s.b, s.t), [0, 1], 7))
sample(aten.constant_pad_nd.default)(lambda s: (s.draw(s.b, s.t), [4, 3], 7))
sample(aten.constant_pad_nd.default)(lambda s: (s.draw(s.b, s.t, s.d), [0, 0, 2, 1]))
sample(aten.constant_pad_nd.default)(lambda s: (s.draw(s.b, s.t + 1), [0, -1]))
sample(aten.constant_pad_nd.default)(lambda s: (s.draw(s.b, s.t + 1), [-1, 0]))
sample(aten.constant_pad_nd.default)(lambda s: (s.draw(s.b, s.t), [1, 0, 0, 2], -1.0))
sample(aten.constant_pad_nd.default)(lambda s: (s.draw(s.b, s.t), [0, 0]))
for split in (aten.split.Tensor, aten.unsafe_split.Tensor):
    sample(split)(lambda s: (s.draw(s.b, s.t, 3 * s.d), s.d, -1))
    sample(split)(lambda s: (s.draw(s.b, 2 * s.t), s.t, 1))
sample(aten.split_with_sizes.default, aten.unsafe_split_with_sizes.default)(
    lambda s: (s.draw(s.b, s.t, s.d + s.k), [s.d, s.k], 2)
)
sample(aten.unbind.int)(lambda s: (s.draw(s.b, s.t, 3), -1))
sample(aten.unbind.int)(lambda s: (s.draw(3, s.b, s.t),))
sample(aten.chunk.default)(lambda s: (s.draw(s.b, s.t, 2 * s.d), 2, -1))
sample(aten.cat.default)(lambda s: ([s.draw(s.b, s.t, s.d), s.draw(s.b, s.t, s.k)], -1))
sample(aten.cat.default)(lambda s: ([s.draw(s.t, s.d), s.draw(s.k, s.d)],))
sample(aten.stack.default)(lambda s: ([s.draw(s.b, s.t), s.draw(s.b, s.t)], 1))
sample(aten.stack.default)(lambda s: ([s.draw(s.b, s.t), s.draw(s.b, s.t)], -1))
sample(aten.repeat.default)(lambda s: (s.draw(s.b, 1, s.d), [1, s.t, 1]))
sample(aten.repeat.default)(lambda s: (s.draw(s.t, s.d), [2, 1, 3]))
sample(aten.flip.default)(lambda s: (s.draw(s.b, s.t, s.d), [1]))
sample(aten.flip.default)(lambda s: (s.draw(s.b, s.t, s.d), [0, -1]))
sample(aten.roll.default)(lambda s: (s.draw(s.b, s.t, s.d), [1], [1]))
sample(aten.roll.default)(lambda s: (s.draw(s.b, s.t), [1]))
sample(aten.select_scatter.default)(lambda s: (s.draw(s.b, s.t, s.d), s.draw(s.b, s.d), 1, -1))
sample(aten.slice_scatter.default)(lambda s: (s.draw(s.b, s.t + 2, s.d), s.draw(s.b, s.t, s.d), 1, 1, s.t + 1))
sample(aten.repeat.default)(lambda s: (s.draw(s.b, s.t, s.d), [1, 3, 1]))
sample(aten.repeat.default)(lambda s: (s.draw(s.t, s.d), [s.b, 2, 2]))
sample(aten.view.dtype)(lambda s: (s.draw(s.b, s.t, s.d), torch.int64))
sample(aten.view.dtype)(lambda s: (s.draw(s.b, s.t, s.d), torch.int16))
sample(RELATIVE_SHIFT)(lambda s: (s.draw(s.b, s.t, s.t + s.k), 1, s.t, s.k))
sample(RELATIVE_SHIFT)(lambda s: (s.draw(s.t, s.t + s.k, s.b), 0, s.t - 1, s.k))
sample(RELATIVE_SHIFT_BACKWARD)(lambda s: (s.draw(s.b, s.t, s.k), 1, s.t, s.t + s.k))
sample(RELATIVE_SHIFT_BACKWARD)(lambda s: (s.draw(s.t, s.k, s.b), 0, s.t - 1, s.t + s.k + 2))
