"""The functions with which Dynamo traces `torch.vmap` into a graph: (arguments: result) in the comments.

vmap runs a function on one row of each operand. Its *level* is the nesting depth of vmaps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._functorch import predispatch  # 2.11, 2.13

ENTER_VMAP: Any = predispatch._vmap_increment_nesting  # (rows, randomness): the level
LEAVE_VMAP: Any = predispatch._vmap_decrement_nesting
ADD_BATCH: Any = predispatch._add_batch_dim  # (value, dim, level): one row
REMOVE_BATCH: Any = predispatch._remove_batch_dim  # (row, level, rows, dim)
LOAD: Any = predispatch.lazy_load_decompositions
PAD: Any = torch._C._nn.pad
SLICE: Any = torch.ops.aten.slice  # the packet, which an associative scan calls


def traced_on_rows(function: Callable[..., Any], rows: list[torch.Tensor]) -> fx.GraphModule:
    """Trace a function to a graph of ATen operators, on the example tensors `rows`, without gradients.

    Active contexts, such as autocast, apply (2.11, 2.13).
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.no_grad():
        return make_fx(function)(*rows)
