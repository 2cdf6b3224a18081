"""Sample calls of look-ups."""

from __future__ import annotations

import torch

from tests.support.samples.registry import sample

aten = torch.ops.aten

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
