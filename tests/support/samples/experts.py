"""Sample calls of products in which each row chooses its weight; some rows choose none."""

from __future__ import annotations

from streamfx.kernels.grouped_mm import GROUPED_MM, GROUPED_OUTER
from tests.support.samples.registry import sample

sample(GROUPED_MM)(lambda s: (s.draw(s.t, s.d), s.draw(s.v, s.d, s.k), s.integers(s.v + 1, s.t)))
sample(GROUPED_OUTER)(lambda s: (s.draw(s.t, s.d), s.draw(s.t, s.k), s.integers(s.v + 1, s.t), s.v))
