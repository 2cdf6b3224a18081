"""Tensors in the arguments and results of operators, which every call looks up."""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from streamfx.torch_private import tree_iter, tree_leaves

LEAF_TYPES = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})

OPAQUE_TYPES = (nn.Module, type, FunctionType, MethodType, ModuleType)  # objects that hold more than the returned values


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Yield all tensors in nested values, in order and with repetitions; for a sparse tensor, its indices and its values.

    `tree_iter` yields the same but takes several times as long: it looks up every number among the container types.
    """
    kind = type(values)
    if kind in LEAF_TYPES:
        return
    if kind is tuple or kind is list:
        for value in values:
            yield from tensors_in(value)
    elif kind is dict:
        for value in values.values():
            yield from tensors_in(value)
    elif isinstance(values, Tensor):  # last: torch also looks for fakes of its classes, which takes longer than all checks above
        yield from (values._indices(), values._values()) if values.layout is torch.sparse_coo else (values,)
    else:
        yield from (value for value in tree_iter(values) if isinstance(value, Tensor))


def tensors_returned(value: Any) -> list[Tensor]:
    """Return all tensors in a model's output, including the attributes of custom objects (such as a dataclass).

    >>> from types import SimpleNamespace
    >>> [tensor.item() for tensor in tensors_returned([torch.tensor(1), SimpleNamespace(loss=torch.tensor(2), name="")])]
    [1, 2]
    """
    tensors: list[Tensor] = []
    todo, seen = [value], set[int]()
    while todo:
        leaves = tree_leaves(todo.pop(0))
        tensors += (leaf for leaf in leaves if isinstance(leaf, Tensor))
        objects = [
            leaf
            for leaf in leaves
            if hasattr(leaf, "__dict__") and not isinstance(leaf, (*OPAQUE_TYPES, Tensor)) and id(leaf) not in seen
        ]
        seen.update(map(id, objects))
        todo += (vars(leaf) for leaf in objects)
    return tensors
