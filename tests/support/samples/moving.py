"""Sample calls of operators that make constants, move elements, look rows up, or work on each element alone."""

from __future__ import annotations

import torch

from streamfx.runtime.rel_shift import RELATIVE_SHIFT, RELATIVE_SHIFT_BACKWARD
from tests.support.samples.registry import sample

aten = torch.ops.aten

# -- views

for view in (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.view_copy.default):
    sample(view)(lambda s: (s.draw(s.b, s.t, s.d), [s.b * s.t, s.d]))
    sample(view)(lambda s: (s.draw(s.b * s.t, s.d * s.k), [s.b, s.t, s.d, s.k]))
sample(aten.view.default, aten.reshape.default)(lambda s: (s.draw(s.t, s.b, s.d, s.k), [s.t, s.b * s.d, 1, s.k]))
sample(aten.view.default, aten.reshape.default)(lambda s: (s.draw(s.b, s.t), [-1]))
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

# -- rows that are looked up, and written

sample(aten.embedding.default)(lambda s: (s.draw(s.v, s.d), s.integers(s.v, s.b, s.t)))
sample(aten.embedding.default)(lambda s: (s.draw(s.v, s.d), s.integers(s.v, s.t), 0))
sample(aten.embedding_dense_backward.default)(lambda s: (s.draw(s.b, s.t, s.d), s.integers(s.v, s.b, s.t), s.v, 0, False))
sample(aten.bucketize.Tensor)(lambda s: (s.draw(s.b, s.t), s.draw(s.v).sort().values, {"right": True}))
sample(aten.gather.default)(lambda s: (s.draw(s.b, s.t, s.v), -1, s.integers(s.v, s.b, s.t, 1)))
sample(aten.gather.default)(lambda s: (s.draw(s.b, s.t), 1, s.integers(s.t, s.b, s.k)))
sample(aten.scatter_add.default, aten.scatter.src)(
    lambda s: (s.draw(s.b, s.t, s.v), 2, s.integers(s.v, s.b, s.t, 1), s.draw(s.b, s.t, 1))
)
sample(aten.scatter.value)(lambda s: (s.draw(s.b, s.t, s.v), 2, s.integers(s.v, s.b, s.t, 1), 3.0))
sample(aten.scatter_reduce.two)(lambda s: (s.draw(s.b, s.t, s.v), 2, s.integers(s.v, s.b, s.t, 1), s.draw(s.b, s.t, 1), "amax"))
sample(aten.index_select.default)(lambda s: (s.draw(s.b, s.t, s.d), 1, s.integers(s.t, s.k)))
sample(aten.index_select.default)(lambda s: (s.draw(s.b, s.t, s.d), 1, torch.tensor(s.t - 1)))
for looked_up in (aten.index.Tensor, aten._unsafe_index.Tensor):
    sample(looked_up)(lambda s: (s.draw(s.v, s.d), [s.integers(s.v, s.b, s.t)]))
    sample(looked_up)(lambda s: (s.draw(s.b, s.t), [s.integers(s.b, s.b, 1), s.integers(s.t, s.k)]))
    sample(looked_up)(lambda s: (s.draw(s.b, s.t, s.d), [None, s.integers(s.t, s.k), None]))
    sample(looked_up)(lambda s: (s.draw(s.b, s.t, s.d), [s.integers(s.b, s.k), None, s.integers(s.d, s.k)]))
for put in (aten.index_put.default, aten._unsafe_index_put.default):
    sample(put)(lambda s: (s.draw(s.b, s.t, s.d), [None, None, torch.randperm(s.d)], s.draw(s.b, s.t, s.d)))
    sample(put)(lambda s: (s.draw(s.b, s.t, s.d), [None, s.integers(s.t, s.k)], s.draw(s.b, s.k, 1), True))
    sample(put)(lambda s: (s.draw(s.v, s.d), [s.integers(s.v, s.b, s.t)], s.draw(s.b, s.t, s.d), True))
    sample(put)(lambda s: (s.draw(s.b, s.t, s.d), [s.integers(s.b, s.k), None, s.integers(s.d, s.k)], s.draw(s.t), True))
sample(aten.index_add.default)(lambda s: (s.draw(s.v, s.d), 0, s.integers(s.v, s.t), s.draw(s.t, s.d)))
sample(aten.index_add.default)(lambda s: (s.draw(s.b, s.t, s.v), 2, s.integers(s.v, s.k), s.draw(s.b, s.t, s.k), {"alpha": 2}))

# -- constants

sample(aten.full.default)(lambda s: ([s.b, s.t], 2.5))
sample(aten.zeros.default, aten.ones.default)(lambda s: ([s.b, s.t],))
sample(aten.empty.memory_format, aten.rand.default, aten.randn.default, random=True)(lambda s: ([s.b, s.t],))
sample(aten.new_zeros.default, aten.new_ones.default)(lambda s: (s.draw(s.d), [s.b, s.t]))
sample(aten.new_full.default)(lambda s: (s.draw(s.d), [s.b, s.t], 2.5))
sample(aten.new_empty.default, random=True)(lambda s: (s.draw(s.d), [s.b, s.t]))
sample(aten.arange.default)(lambda s: (s.t,))
sample(aten.arange.start)(lambda s: (2, 2 + s.t))
sample(aten.arange.start_step)(lambda s: (1, 1 + 3 * s.t, 3))
sample(aten.linspace.default)(lambda s: (0, 1, s.t))
sample(aten.eye.default)(lambda s: (s.t,))
sample(aten.tril.default, aten.triu.default)(lambda s: (s.draw(s.b, s.t, s.k),))
sample(aten.tril.default, aten.triu.default)(lambda s: (s.draw(s.t, s.t), 1))
sample(aten.tril.default, aten.triu.default)(lambda s: (s.draw(s.t, s.t), -1))

# -- each element alone, where torch does not tag it

sample(
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.detach.default,
    aten.alias.default,
    aten.lift_fresh_copy.default,
    aten.conj_physical.default,
)(lambda s: (s.draw(s.b, s.t),))
sample(aten.full_like.default)(lambda s: (s.draw(s.b, s.t), 3.0))
sample(aten.empty_like.default, aten.rand_like.default, aten.randn_like.default, random=True)(lambda s: (s.draw(s.b, s.t),))
sample(aten.bernoulli.default, random=True)(lambda s: (s.positive(s.b, s.t) / 2,))
sample(aten.bernoulli.p, random=True)(lambda s: (s.draw(s.b, s.t), 0.5))
sample(aten.native_dropout.default, random=True)(lambda s: (s.draw(s.b, s.t), 0.5, True))
sample(aten._to_copy.default)(lambda s: (s.draw(s.b, s.t), {"dtype": torch.float32}))
sample(aten.fill.Tensor)(lambda s: (s.draw(s.b, s.t), s.draw()))
sample(aten.copy.default)(lambda s: (s.draw(s.b, s.t), s.draw(s.t)))
sample(aten.softplus_backward.default)(lambda s: (s.draw(s.b, s.t), s.draw(s.b, s.t), 1.0, 20.0))
sample(aten.hardtanh_backward.default)(lambda s: (s.draw(s.b, s.t), s.draw(s.b, s.t), -1.0, 1.0))
sample(aten.masked_fill.Tensor)(lambda s: (s.draw(s.b, s.t), s.booleans(s.t), torch.tensor(2.0, dtype=torch.float64)))
sample(aten.elu_backward.default)(lambda s: (s.draw(s.b, s.t), 1.0, 1.0, 1.0, False, s.draw(s.b, s.t)))
sample(aten.leaky_relu_backward.default)(lambda s: (s.draw(s.b, s.t), s.draw(s.b, s.t), 0.1, False))
sample(aten.mish_backward.default, aten.hardswish_backward.default, aten.hardsigmoid_backward.default)(
    lambda s: (s.draw(s.b, s.t), s.draw(s.b, s.t))
)
sample(aten.log_sigmoid_forward.default)(lambda s: (s.draw(s.b, s.t),))
sample(aten.log_sigmoid_backward.default)(
    lambda s: (s.draw(s.b, s.t), x := s.draw(s.b, s.t), aten.log_sigmoid_forward.default(x)[1])
)
sample(aten.polar.default, aten.complex.default)(lambda s: (s.draw(s.b, s.t), s.draw(s.b, s.t)))
sample(aten.real.default, aten.imag.default)(lambda s: (torch.complex(s.draw(s.b, s.t), s.draw(s.b, s.t)),))
sample(aten.view_as_real.default)(lambda s: (torch.complex(s.draw(s.b, s.t), s.draw(s.b, s.t)),))
sample(aten.view_as_complex.default)(lambda s: (s.draw(s.b, s.t, 2),))
sample(aten.floor_divide.default)(lambda s: (s.draw(s.b, s.t), s.positive(s.t)))
sample(aten.floor_divide.Scalar)(lambda s: (s.draw(s.b, s.t), 0.3))
sample(aten.scalar_tensor.default)(lambda s: (2.0,))
sample(aten.exponential.default, aten.uniform.default, aten.normal_functional.default, random=True)(
    lambda s: (s.draw(s.b, s.t, s.d),)
)
