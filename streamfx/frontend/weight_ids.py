"""Identifiers of the weights of a process. Unlike Python's `id`, an identifier is never reused for another tensor."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import Any

from torch.nn import Parameter
from torch.utils.weak import WeakTensorKeyDictionary

_next_id = count()
_id_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def weight_ids(values: Iterable[Any]) -> list[int]:
    """Return the identifiers of the parameters among some values, in order; other values are skipped.

    A parameter that is seen for the first time gets the next integer.
    """
    weights = [value for value in values if isinstance(value, Parameter)]
    for weight in weights:
        if weight not in _id_of:
            _id_of[weight] = next(_next_id)
    return [_id_of[weight] for weight in weights]
