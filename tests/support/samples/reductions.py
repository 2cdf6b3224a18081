"""Sample calls of operators that work along a dimension: products, reductions, running sums, sorts, normalisations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from streamfx.passes.ops.rules.scans import REVERSE
from tests.support.samples.registry import Sizes, sample

aten = torch.ops.aten

# -- products

sample(aten.mm.default)(lambda s: (s.draw(s.t, s.d), s.draw(s.d, s.k)))
sample(aten.mm.default)(lambda s: (s.draw(s.d, s.t), s.draw(s.t, s.k)))
sample(aten.bmm.default)(lambda s: (s.draw(s.b, s.t, s.d), s.draw(s.b, s.d, s.k)))
sample(aten.bmm.default)(lambda s: (s.draw(s.b, s.d, s.t), s.draw(s.b, s.t, s.k)))
sample(aten.mv.default)(lambda s: (s.draw(s.t, s.d), s.draw(s.d)))
sample(aten.dot.default, aten.vdot.default)(lambda s: (s.draw(s.t), s.draw(s.t)))
sample(aten._cdist_forward.default)(lambda s: (s.draw(s.b, s.t, s.d), s.draw(s.b, s.k, s.d), 2.0, 2))
sample(aten._cdist_backward.default)(
    lambda s: (s.draw(s.b, s.t, s.k), s.draw(s.b, s.t, s.d), s.draw(s.b, s.k, s.d), 2.0, s.positive(s.b, s.t, s.k))
)
sample(aten.addmm.default)(lambda s: (s.draw(s.k), s.draw(s.t, s.d), s.draw(s.d, s.k)))
sample(aten.addmm.default)(lambda s: (s.draw(s.t, 1), s.draw(s.t, s.d), s.draw(s.d, s.k)))
sample(aten.addmm.default)(lambda s: (s.draw(s.t, s.k), s.draw(s.t, s.d), s.draw(s.d, s.k), {"beta": 2, "alpha": 3}))
sample(aten.baddbmm.default)(lambda s: (s.draw(s.b, s.t, s.k), s.draw(s.b, s.t, s.d), s.draw(s.b, s.d, s.k)))
sample(aten.baddbmm.default)(lambda s: (s.draw(s.k), s.draw(s.b, s.t, s.d), s.draw(s.b, s.d, s.k), {"beta": 0.5}))

# -- reductions

for one_dim in (aten.sum.dim_IntList, aten.mean.dim, aten.logsumexp.default, aten.amax.default, aten.amin.default):
    sample(one_dim)(lambda s: (s.draw(s.b, s.t, s.d), [1]))
    sample(one_dim)(lambda s: (s.draw(s.b, s.t, s.d), [-1, 0], True))
for no_dim in (aten.sum.default, aten.mean.default, aten.max.default, aten.min.default, aten.prod.default):
    sample(no_dim)(lambda s: (s.draw(s.b, s.t),))
sample(aten.sum.default)(lambda s: (s.booleans(s.b, s.t),))
sample(aten.sum.dim_IntList)(lambda s: (s.draw(s.b, s.t), None))
sample(aten.sum.dim_IntList)(lambda s: (s.integers(5, s.b, s.t), [1], False, {"dtype": torch.float64}))
sample(aten.mean.dim)(lambda s: (s.draw(s.b, s.t, s.d), [0, 1, 2]))
sample(aten.amax.default, aten.amin.default)(lambda s: (s.draw(s.b, s.t),))
sample(aten.max.dim, aten.min.dim, aten.median.dim)(lambda s: (s.draw(s.b, s.t), 1))
sample(aten.max.dim, aten.min.dim, aten.median.dim)(lambda s: (s.draw(s.b, s.t), -2, True))
sample(aten.argmax.default, aten.argmin.default)(lambda s: (s.draw(s.b, s.t, s.d), -1))
sample(aten.argmax.default, aten.argmin.default)(lambda s: (s.draw(s.b, s.t),))
sample(aten.any.default, aten.all.default)(lambda s: (s.booleans(s.b, s.t),))
sample(aten.any.dim, aten.all.dim)(lambda s: (s.booleans(s.b, s.t), 1))
sample(aten.any.dims, aten.all.dims)(lambda s: (s.booleans(s.b, s.t, s.d), [0, 1], True))
sample(aten.any.dims, aten.all.dims)(lambda s: (s.booleans(s.b, s.t), []))
sample(aten.any.dims, aten.all.dims)(lambda s: (s.booleans(s.b, s.t), [], True))
sample(aten.any.dims, aten.all.dims)(lambda s: (s.booleans(s.b, s.t), None))
sample(aten.any.dims, aten.all.dims)(lambda s: (s.booleans(s.b, s.t), None, True))
sample(aten.sum.dim_IntList, aten.mean.dim)(lambda s: (s.draw(s.b, s.t), None))
sample(aten.sum.dim_IntList, aten.mean.dim)(lambda s: (s.draw(s.b, s.t), [], True))
sample(aten.amax.default, aten.amin.default)(lambda s: (s.draw(s.b, s.t), [], True))
sample(aten.linalg_vector_norm.default)(lambda s: (s.draw(s.b, s.t), 2, []))
sample(aten.prod.dim_int)(lambda s: (s.draw(s.b, s.t), 1))
sample(aten.var.correction, aten.std.correction, aten.var_mean.correction)(
    lambda s: (s.draw(s.b, s.t, s.d + 1), [-1], {"correction": 1, "keepdim": True})
)
sample(aten.linalg_vector_norm.default)(lambda s: (s.draw(s.b, s.t, s.d), 2, [-1], True))
sample(aten.linalg_vector_norm.default)(lambda s: (s.draw(s.b, s.t),))

# -- along one dimension

for normal in (aten._softmax.default, aten._log_softmax.default):
    sample(normal)(lambda s: (s.draw(s.b, s.t, s.d), -1, False))
    sample(normal)(lambda s: (s.draw(s.b, s.t, s.d), 1, False))
sample(aten._safe_softmax.default)(lambda s: (s.draw(s.b, s.t, s.d), -1))
for backward in (aten._softmax_backward_data.default, aten._log_softmax_backward_data.default):
    sample(backward)(lambda s: (s.draw(s.b, s.t, s.d), s.draw(s.b, s.t, s.d), -1, torch.float64))
    sample(backward)(lambda s: (s.draw(s.b, s.t, s.d), s.draw(s.b, s.t, s.d), 0, torch.float64))
running_kinds = (aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default, aten.cummax.default, aten.cummin.default)
for running in (*running_kinds, *REVERSE):
    sample(running)(lambda s: (s.draw(s.b, s.t, s.d), 1))
    sample(running)(lambda s: (s.draw(s.b, s.t), 0))
sample(aten.sort.default, aten.argsort.default)(lambda s: (s.draw(s.b, s.t, s.d), 1))
sample(aten.sort.default, aten.argsort.default)(lambda s: (s.draw(s.b, s.t),))
sample(aten.sort.stable)(lambda s: (s.draw(s.b, s.t), {"stable": True, "dim": 0}))
sample(aten.argsort.stable)(lambda s: (s.draw(s.b, s.t), {"stable": True, "dim": 0}))
sample(aten.topk.default)(lambda s: (s.draw(s.b, s.t, s.d), 1))
sample(aten.topk.default)(lambda s: (s.draw(s.b, s.t, s.d), s.t, 1))
sample(aten.kthvalue.default)(lambda s: (s.draw(s.b, s.t, s.d), 1))
sample(aten.kthvalue.default)(lambda s: (s.draw(s.b, s.t, s.d), 1, 1, True))


def spectrum(s: Sizes) -> Tensor:
    return torch.complex(s.draw(s.b, s.t, s.d), s.draw(s.b, s.t, s.d))


sample(aten._fft_r2c.default)(lambda s: (s.draw(s.b, s.t, s.d), [2], 0, True))
sample(aten._fft_r2c.default)(lambda s: (s.draw(s.b, s.t, s.d), [0, 2], 0, True))
sample(aten._fft_r2c.default)(lambda s: (s.draw(s.b, s.t, s.d), [1], 0, False))
sample(aten._fft_c2c.default)(lambda s: (spectrum(s), [2], 1, True))
sample(aten._fft_c2c.default)(lambda s: (spectrum(s), [0, 2], 1, False))
sample(aten._fft_c2r.default)(lambda s: (spectrum(s), [2], 2, 2 * s.d - 1))

# -- normalisations


def statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.mean(-1, keepdim=True), torch.rsqrt(x.var(-1, keepdim=True, correction=0) + 1e-5)


sample(aten.native_layer_norm.default)(lambda s: (s.draw(s.b, s.t, s.d), [s.d], s.draw(s.d), s.draw(s.d), 1e-5))
sample(aten.native_layer_norm.default)(lambda s: (s.draw(s.b, s.t, s.d), [s.d], None, None, 1e-5))
sample(aten.native_layer_norm.default)(lambda s: (s.draw(s.b, s.t, s.d), [s.t, s.d], s.draw(s.t, s.d), None, 1e-5))


@sample(aten.native_layer_norm_backward.default)
def layer_norm_backward(s: Sizes) -> tuple[Any, ...]:
    x = s.draw(s.b, s.t, s.d)
    return s.draw(s.b, s.t, s.d), x, [s.d], *statistics(x), s.draw(s.d), s.draw(s.d), [True, True, True]


@sample(aten._fused_rms_norm.default)
def rms_norm(s: Sizes) -> tuple[Any, ...]:
    return s.draw(s.b, s.t, s.d), [s.d], s.draw(s.d), 1e-5


@sample(aten._fused_rms_norm_backward.default, random=True)
def rms_norm_backward(s: Sizes) -> tuple[Any, ...]:
    """There is no CPU kernel: only shapes can be compared."""
    x, scale, weight = (item.to("meta") for item in (s.draw(s.b, s.t, s.d), s.draw(s.b, s.t, 1), s.draw(s.d)))
    return x, x.clone(), [s.d], scale, weight, [True, True]


sample(aten.linalg_solve_triangular.default)(lambda s: (s.draw(s.b, s.t, s.d, s.d), s.draw(s.b, s.t, s.d, s.k), {"upper": True}))
sample(aten.linalg_solve_triangular.default)(
    lambda s: (s.draw(s.b, s.d, s.d), s.draw(s.b, s.t, s.d), {"upper": False, "left": False})
)
sample(aten.histc.default)(lambda s: (s.integers(s.v, s.b, s.t).double(), s.v + 1, 0, s.v))
