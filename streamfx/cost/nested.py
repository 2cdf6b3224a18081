"""Tensors in the arguments and results of operators, which are asked for at every call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from streamfx.torch_private import tree_iter

PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})


def tensors_in(values: Any) -> Iterator[Tensor]:
    """All tensors in nested values, in order, one as often as it is there.

    What `tree_iter` finds, which takes several times as long: it looks every number up among the kinds of containers.
    """
    kind = type(values)
    if kind in PLAIN:
        return
    if kind is tuple or kind is list:
        for value in values:
            yield from tensors_in(value)
    elif kind is dict:
        for value in values.values():
            yield from tensors_in(value)
    elif isinstance(values, Tensor):  # last: torch looks for fakes of its classes, which takes longer than all of the above
        yield values
    else:
        yield from (value for value in tree_iter(values) if isinstance(value, Tensor))
