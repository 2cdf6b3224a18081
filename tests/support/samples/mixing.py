"""Sample calls of operators that work along a dimension: products, reductions, scans, sorts, norms, convolutions, losses."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from streamfx.kernels.grouped_mm import GROUPED_MM, GROUPED_OUTER
from streamfx.kernels.sdpa import ATTENTION, ATTENTION_BACKWARD
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


sample(aten._fused_rms_norm.default)(lambda s: (s.draw(s.b, s.t, s.d), [s.d], s.draw(s.d), 1e-5))


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

# -- convolutions over t rows in steps of one: (x, weight, bias?, options)


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


def gradient_of_weight(s: Sizes, number: int) -> tuple[Any, ...]:
    x, weight, _, *others = list(convolutions(s))[number]
    y = aten.convolution(x, weight, None, *others)
    return s.draw(*y.shape), x, weight, None, *others, [False, True, False]


def convolution(s: Sizes, number: int) -> tuple[Any, ...]:
    return list(convolutions(s))[number]


for number in range(14):
    sample(aten.convolution.default)(partial(convolution, number=number))
    sample(aten.convolution_backward.default)(partial(gradient_of_weight, number=number))

# -- attention: b batches, two heads, t queries, k keys


def attended(s: Sizes, heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    return s.draw(s.b, 2, s.t, 4), s.draw(s.b, heads, s.k, 4), s.draw(s.b, heads, s.k, 4)


def attended_back(s: Sizes, heads: int = 2, **how: Any) -> tuple[Any, ...]:
    inputs = attended(s, heads)
    out, lse = ATTENTION(*inputs, **how)
    return s.draw(*out.shape), *inputs, out, lse, how


sample(ATTENTION)(lambda s: (*attended(s), {"scale": 0.3, "is_causal": True}))
sample(ATTENTION)(lambda s: attended(s, heads=1))
sample(ATTENTION)(lambda s: (*attended(s), {"attn_mask": s.draw(s.b, 1, s.t, s.k)}))
sample(ATTENTION)(lambda s: (*attended(s), {"attn_mask": s.draw(s.t, s.k), "is_causal": True}))
sample(ATTENTION)(lambda s: (*attended(s), {"attn_mask": s.draw(s.b, 1, 1, s.k)}))
sample(ATTENTION_BACKWARD)(lambda s: attended_back(s, is_causal=False, scale=0.3))
sample(ATTENTION_BACKWARD)(lambda s: attended_back(s, is_causal=True, scale=0.5))
sample(ATTENTION_BACKWARD)(lambda s: attended_back(s, heads=1, is_causal=False, scale=0.5))
sample(ATTENTION_BACKWARD)(lambda s: attended_back(s, is_causal=False, attn_mask=s.draw(s.b, 1, s.t, s.k)))

# -- losses


def likelihoods(s: Sizes, *middle: int) -> tuple[Tensor, Tensor]:
    batch = (s.b,) if middle else ()
    return s.draw(*batch, *((s.v, *middle, s.t) if middle else (s.t, s.v))), s.integers(s.v, *batch, *middle, s.t)


forward, backward = aten.nll_loss_forward.default, aten.nll_loss_backward.default
sample(forward)(lambda s: (*likelihoods(s), None, 0, -100))
sample(forward)(lambda s: (*likelihoods(s), s.positive(s.v), 2, 0))
sample(forward)(lambda s: (*likelihoods(s), None, 1, -100))
sample(backward)(lambda s: (s.draw(s.t), *likelihoods(s), None, 0, -100, s.positive()))
sample(backward)(lambda s: (s.draw(), *likelihoods(s), s.positive(s.v), 2, 0, s.positive()))
sample(backward)(lambda s: (s.draw(), *likelihoods(s), None, 1, -100, s.positive()))
sample(aten.nll_loss2d_forward.default)(lambda s: (*likelihoods(s, 1), None, 0, -100))
sample(aten.nll_loss2d_forward.default)(lambda s: (*likelihoods(s, s.k), s.positive(s.v), 2, 0))
sample(aten.nll_loss2d_backward.default)(lambda s: (s.draw(), *likelihoods(s, 1), None, 2, -100, s.positive()))
sample(aten.nll_loss2d_backward.default)(lambda s: (s.draw(s.b, 1, s.t), *likelihoods(s, 1), None, 0, -100, s.positive()))

# -- products in which each row chooses its weight; some rows choose none

sample(GROUPED_MM)(lambda s: (s.draw(s.t, s.d), s.draw(s.v, s.d, s.k), s.integers(s.v + 1, s.t)))
sample(GROUPED_OUTER)(lambda s: (s.draw(s.t, s.d), s.draw(s.t, s.k), s.integers(s.v + 1, s.t), s.v))
