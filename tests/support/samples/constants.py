"""Sample calls of operators that make constants, and of those that cut triangles out."""

from __future__ import annotations

import torch

from tests.support.samples.registry import sample

aten = torch.ops.aten

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
