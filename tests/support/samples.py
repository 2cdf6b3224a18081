"""Sample calls for every operator that has a rule, over sizes b t d k v that may well be equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from streamfx.passes.rules.scans import REVERSE
from streamfx.runtime.kernels import ATTENTION, ATTENTION_BACKWARD
from tests.support.laws import Call

aten = torch.ops.aten


@dataclass(frozen=True)
class Sizes:
    """Batch, sequence, width, another width, vocabulary; and the seed of the values."""

    b: int
    t: int
    d: int
    k: int
    v: int
    seed: int = 0

    def draw(self, *shape: int) -> Tensor:
        """Normal numbers, another draw for each call."""
        return torch.randn(shape, dtype=torch.float64)

    def positive(self, *shape: int) -> Tensor:
        return torch.rand(shape, dtype=torch.float64) + 0.1

    def integers(self, below: int, *shape: int) -> Tensor:
        return torch.randint(0, below, shape)

    def booleans(self, *shape: int) -> Tensor:
        return torch.rand(shape) < 0.5


Sample: TypeAlias = "Callable[[Sizes], tuple[Any, ...]]"
SAMPLES: dict[Any, list[Sample]] = {}
RANDOM: set[Any] = set()


def sample(*operators: Any, random: bool = False) -> Callable[[Sample], Sample]:
    """Register a function from sizes to arguments; a last dictionary holds keyword arguments."""

    def register(function: Sample) -> Sample:
        for target in operators:
            SAMPLES.setdefault(target, []).append(function)
            if random:
                RANDOM.add(target)
        return function

    return register


def calls(target: Any, sizes: Sizes) -> Iterator[Call]:
    for function in SAMPLES[target]:
        torch.manual_seed(sizes.seed)
        args = function(sizes)
        kwargs = args[-1] if args and isinstance(args[-1], dict) else {}
        yield Call(target, args[:-1] if kwargs else args, kwargs, target in RANDOM)


# -- products

sample(aten.mm.default)(lambda s: (s.draw(s.t, s.d), s.draw(s.d, s.k)))
sample(aten.mm.default)(lambda s: (s.draw(s.d, s.t), s.draw(s.t, s.k)))
sample(aten.bmm.default)(lambda s: (s.draw(s.b, s.t, s.d), s.draw(s.b, s.d, s.k)))
sample(aten.bmm.default)(lambda s: (s.draw(s.b, s.d, s.t), s.draw(s.b, s.t, s.k)))
sample(aten.mv.default)(lambda s: (s.draw(s.t, s.d), s.draw(s.d)))
sample(aten.dot.default, aten.vdot.default)(lambda s: (s.draw(s.t), s.draw(s.t)))
sample(aten.addmm.default)(lambda s: (s.draw(s.k), s.draw(s.t, s.d), s.draw(s.d, s.k)))
sample(aten.addmm.default)(lambda s: (s.draw(s.t, 1), s.draw(s.t, s.d), s.draw(s.d, s.k)))
sample(aten.addmm.default)(lambda s: (s.draw(s.t, s.k), s.draw(s.t, s.d), s.draw(s.d, s.k), {"beta": 2, "alpha": 3}))
sample(aten.baddbmm.default)(lambda s: (s.draw(s.b, s.t, s.k), s.draw(s.b, s.t, s.d), s.draw(s.b, s.d, s.k)))
sample(aten.baddbmm.default)(lambda s: (s.draw(s.k), s.draw(s.b, s.t, s.d), s.draw(s.b, s.d, s.k), {"beta": 0.5}))

# -- views


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
sample(aten.select_backward.default)(lambda s: (s.draw(s.b, s.d), [s.b, s.t, s.d], 1, s.t - 1))
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
sample(aten.split.Tensor)(lambda s: (s.draw(s.b, s.t, 3 * s.d), s.d, -1))
sample(aten.split.Tensor)(lambda s: (s.draw(s.b, 2 * s.t), s.t, 1))
sample(aten.split_with_sizes.default)(lambda s: (s.draw(s.b, s.t, s.d + s.k), [s.d, s.k], 2))
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


# -- look-ups

sample(aten.embedding.default)(lambda s: (s.draw(s.v, s.d), s.integers(s.v, s.b, s.t)))
sample(aten.embedding.default)(lambda s: (s.draw(s.v, s.d), s.integers(s.v, s.t), 0))
sample(aten.embedding_dense_backward.default)(lambda s: (s.draw(s.b, s.t, s.d), s.integers(s.v, s.b, s.t), s.v, 0, False))
sample(aten.gather.default)(lambda s: (s.draw(s.b, s.t, s.v), -1, s.integers(s.v, s.b, s.t, 1)))
sample(aten.gather.default)(lambda s: (s.draw(s.b, s.t), 1, s.integers(s.t, s.b, s.k)))
sample(aten.scatter_add.default, aten.scatter.src)(
    lambda s: (s.draw(s.b, s.t, s.v), 2, s.integers(s.v, s.b, s.t, 1), s.draw(s.b, s.t, 1))
)
sample(aten.scatter.value)(lambda s: (s.draw(s.b, s.t, s.v), 2, s.integers(s.v, s.b, s.t, 1), 3.0))
sample(aten.index_select.default)(lambda s: (s.draw(s.b, s.t, s.d), 1, s.integers(s.t, s.k)))
sample(aten.index_select.default)(lambda s: (s.draw(s.b, s.t, s.d), 1, torch.tensor(s.t - 1)))
for looked_up in (aten.index.Tensor, aten._unsafe_index.Tensor):
    sample(looked_up)(lambda s: (s.draw(s.v, s.d), [s.integers(s.v, s.b, s.t)]))
    sample(looked_up)(lambda s: (s.draw(s.b, s.t), [s.integers(s.b, s.b, 1), s.integers(s.t, s.k)]))
    sample(looked_up)(lambda s: (s.draw(s.b, s.t, s.d), [None, s.integers(s.t, s.k), None]))
    sample(looked_up)(lambda s: (s.draw(s.b, s.t, s.d), [s.integers(s.b, s.k), None, s.integers(s.d, s.k)]))

# -- losses


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


# -- fused attention: b batches, two heads, t queries, k keys


def attention_inputs(s: Sizes, heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    return s.draw(s.b, 2, s.t, 4), s.draw(s.b, heads, s.k, 4), s.draw(s.b, heads, s.k, 4)


@sample(ATTENTION)
def open_attention(s: Sizes) -> tuple[Any, ...]:
    return attention_inputs(s)


@sample(ATTENTION)
def causal_attention(s: Sizes) -> tuple[Any, ...]:
    return *attention_inputs(s), {"scale": 0.3, "is_causal": True}


@sample(ATTENTION)
def grouped_attention(s: Sizes) -> tuple[Any, ...]:
    return attention_inputs(s, heads=1)


@sample(ATTENTION)
def masked_attention(s: Sizes) -> tuple[Any, ...]:
    return *attention_inputs(s), {"attn_mask": s.draw(s.b, 1, s.t, s.k)}


@sample(ATTENTION)
def causal_and_masked_attention(s: Sizes) -> tuple[Any, ...]:
    return *attention_inputs(s), {"attn_mask": s.draw(s.t, s.k), "is_causal": True}


@sample(ATTENTION)
def attention_masked_by_key(s: Sizes) -> tuple[Any, ...]:
    return *attention_inputs(s), {"attn_mask": s.draw(s.b, 1, 1, s.k)}


def backward_inputs(inputs: tuple[Tensor, Tensor, Tensor], s: Sizes, causal: bool, **kwargs: Any) -> tuple[Any, ...]:
    kwargs["is_causal"] = causal
    out, lse = ATTENTION(*inputs, **kwargs)
    return s.draw(*out.shape), *inputs, out, lse, kwargs


@sample(ATTENTION_BACKWARD)
def open_attention_backward(s: Sizes) -> tuple[Any, ...]:
    return backward_inputs(attention_inputs(s), s, False, scale=0.3)


@sample(ATTENTION_BACKWARD)
def causal_attention_backward(s: Sizes) -> tuple[Any, ...]:
    return backward_inputs(attention_inputs(s), s, True, scale=0.5)


@sample(ATTENTION_BACKWARD)
def grouped_attention_backward(s: Sizes) -> tuple[Any, ...]:
    return backward_inputs(attention_inputs(s, heads=1), s, False, scale=0.5)


@sample(ATTENTION_BACKWARD)
def masked_attention_backward(s: Sizes) -> tuple[Any, ...]:
    return backward_inputs(attention_inputs(s), s, False, attn_mask=s.draw(s.b, 1, s.t, s.k))


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

# -- pointwise operators that torch does not tag

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
sample(aten.copy.default)(lambda s: (s.draw(s.b, s.t), s.draw(s.t)))
sample(aten.softplus_backward.default)(lambda s: (s.draw(s.b, s.t), s.draw(s.b, s.t), 1.0, 20.0))
sample(aten.hardtanh_backward.default)(lambda s: (s.draw(s.b, s.t), s.draw(s.b, s.t), -1.0, 1.0))
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
sample(aten._conj.default, aten.real.default, aten.imag.default)(lambda s: (torch.complex(s.draw(s.b, s.t), s.draw(s.b, s.t)),))
sample(aten.view_as_real.default)(lambda s: (torch.complex(s.draw(s.b, s.t), s.draw(s.b, s.t)),))
sample(aten.view_as_complex.default)(lambda s: (s.draw(s.b, s.t, 2),))
sample(aten.floor_divide.default)(lambda s: (s.draw(s.b, s.t), s.positive(s.t)))
sample(aten.floor_divide.Scalar)(lambda s: (s.draw(s.b, s.t), 0.3))
sample(aten.scalar_tensor.default)(lambda s: (2.0,))

# -- writes into part of a tensor, systems of equations

sample(aten.select_scatter.default)(lambda s: (s.draw(s.b, s.t, s.d), s.draw(s.b, s.d), 1, -1))
sample(aten.slice_scatter.default)(lambda s: (s.draw(s.b, s.t + 2, s.d), s.draw(s.b, s.t, s.d), 1, 1, s.t + 1))
sample(aten.linalg_solve_triangular.default)(lambda s: (s.draw(s.b, s.t, s.d, s.d), s.draw(s.b, s.t, s.d, s.k), {"upper": True}))
sample(aten.linalg_solve_triangular.default)(
    lambda s: (s.draw(s.b, s.d, s.d), s.draw(s.b, s.t, s.d), {"upper": False, "left": False})
)
sample(aten.repeat.default)(lambda s: (s.draw(s.b, s.t, s.d), [1, 3, 1]))
sample(aten.repeat.default)(lambda s: (s.draw(s.t, s.d), [s.b, 2, 2]))

# -- convolutions over one axis


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


for number in range(9):
    sample(aten.convolution.default)(lambda s, number=number: list(convolutions(s))[number])


def of_weight(s: Sizes, number: int) -> tuple[Any, ...]:
    x, weight, _, *others = list(convolutions(s))[number]
    y = aten.convolution(x, weight, None, *others)
    return s.draw(*y.shape), x, weight, None, *others, [False, True, False]


for number in range(9):
    sample(aten.convolution_backward.default)(lambda s, number=number: of_weight(s, number))
