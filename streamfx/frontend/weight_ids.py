"""Which weights does a graph have? Each tensor has a number, which no other one of the process ever gets, as an `id` might be."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import Any

from torch.nn import Parameter
from torch.utils.weak import WeakTensorKeyDictionary

_numbers = count()
_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def numbers_of_weights(values: Iterable[Any]) -> list[int]:
    """The numbers of the parameters among some values, in order."""
    weights = [value for value in values if isinstance(value, Parameter)]
    for weight in weights:
        if weight not in _known:
            _known[weight] = next(_numbers)
    return [_known[weight] for weight in weights]
