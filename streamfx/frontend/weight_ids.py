"""Number the weights of a process. Unlike an `id`, a number is never reused for another tensor."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import Any

from torch.nn import Parameter
from torch.utils.weak import WeakTensorKeyDictionary

_numbers = count()
_number_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def numbers_of_weights(values: Iterable[Any]) -> list[int]:
    """Return the numbers of the parameters among some values, in order; new parameters get the next numbers."""
    weights = [value for value in values if isinstance(value, Parameter)]
    for weight in weights:
        if weight not in _number_of:
            _number_of[weight] = next(_numbers)
    return [_number_of[weight] for weight in weights]
