"""PyTorch's `scan`, which puts its results in front in 2.11, and along the dimension that it ran along in 2.13."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._higher_order_ops.scan import scan as torch_scan
from torch.utils._pytree import tree_map

_, _made = torch_scan(lambda state, row: (state + row, state * row), torch.zeros(1), torch.zeros(1, 2), dim=1)
ALONG = _made.shape == (1, 2)
with_states_of_constants = pytest.mark.skipif(not ALONG, reason="2.11 loses gradients through states if the first one needs none")
if_aliases_compile = pytest.mark.skipif(
    not ALONG, reason="torch.compile of 2.11, with any backend: scan might be aliasing the input"
)


def scan(step: Callable[..., Any], states: Any, rows: Any, *, dim: int = 0, reverse: bool = False) -> tuple[Any, Any]:
    """Return the final states, and the results of all rows along `dim`, in all versions."""
    last, made = torch_scan(step, states, rows, dim=dim, reverse=reverse)
    return last, made if ALONG else tree_map(lambda result: result.movedim(0, dim), made)
