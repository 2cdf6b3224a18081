"""Importing this module makes every operator of `streamfx.dialect` run on real tensors.

Each module below implements operators when it is imported. (`dialect/quantized.py` has no implementation.) A module that only
writes operators into graphs imports their names from `streamfx.dialect`, which registers no implementation, so
`streamfx.passes` imports this module.
"""

from streamfx.kernels import cuda_products, flash_window, grouped_mm, sdpa  # noqa: F401
from streamfx.runtime import associative, chunked_scans, collective_calls, offload, rel_shift, segment_sum  # noqa: F401
