"""Compute integers on real tensors while all other tensors are fake.

Models read ids and positions in Python (is this batch packed? is there padding?) to choose their masks. Such values are
small, so they are computed, and code that branches on them takes the same branch as with real data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from streamfx.cost.nested_tensors import tensors_in
from streamfx.torch_private import FakeTensor, TorchDispatchMode, real_values

MAX_ELEMENTS = 1 << 22  # elements of a value that is computed
aten = torch.ops.aten
DATA_DEPENDENT_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class RealIntegers(TorchDispatchMode):
    """Inside a FakeTensorMode, run operators on real tensors if they compute integers and have no fake operands."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Stay active while code is compiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run an operator: on real tensors if its operands and results are small integers, otherwise on fake tensors."""
        kwargs = kwargs or {}
        operands = list(tensors_in((args, kwargs)))
        if not all(map(_is_known, operands)):
            cached = aten.view.default if func is aten._unsafe_view.default else func  # fake tensors cache the same result
            return cached(*args, **kwargs)
        tags = set(getattr(func, "tags", ()))
        if torch.Tag.nondeterministic_seeded in tags:
            return func(*args, **kwargs)
        if not (operands and tags & DATA_DEPENDENT_TAGS):
            fake = func(*args, **kwargs)
            if not all(map(_is_small_integer, tensors_in(fake))):
                return fake
        with real_values():
            return func(*args, **kwargs)


def _is_known(tensor: Tensor) -> bool:
    """Return whether a tensor is a small real integer or bool."""
    return not isinstance(tensor, FakeTensor) and not tensor.is_meta and _is_small_integer(tensor)


def _is_small_integer(tensor: Tensor) -> bool:
    """Return whether a tensor has at most `MAX_ELEMENTS` elements, which are integers or bools."""
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.numel() <= MAX_ELEMENTS
