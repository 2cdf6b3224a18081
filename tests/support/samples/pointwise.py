"""Sample calls of pointwise operators that torch does not tag as such."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.samples.registry import Sizes, sample

aten = torch.ops.aten

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


@sample(aten.log_sigmoid_backward.default)
def log_sigmoid_backward(s: Sizes) -> tuple[Any, ...]:
    x = s.draw(s.b, s.t)
    return s.draw(s.b, s.t), x, aten.log_sigmoid_forward.default(x)[1]


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
