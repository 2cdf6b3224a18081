"""Checks for arguments that make a call meaningless: tensors without elements, numpy arrays (they have no fake counterpart), and
a single row of tokens if a batch is expected.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from streamfx.torch_private import keystr, tree_flatten_with_path

DO = "give a batch of at least one sequence, and sequences of at least one row"
AS_TENSORS = "give tensors: torch.as_tensor(array)"
NO_BATCH = "{found} has no batch dimension: if the model takes batches of sequences, give tensor[None]"


def empty_inputs_text(inputs: Any) -> str:
    """Return the tensors without elements among the arguments of a call, as text; empty if there are none.

    >>> import torch
    >>> empty_inputs_text(((torch.zeros(2, 0),), {"labels": torch.zeros(2)}))
    'input [0] of shape (2, 0)'
    """
    return _inputs_text(inputs, lambda value: isinstance(value, Tensor) and not value.numel())


def numpy_inputs_text(inputs: Any) -> str:
    """Return the numpy arrays among the arguments of a call, as text; empty if there are none.

    >>> import numpy
    >>> numpy_inputs_text(((), {"ids": numpy.zeros((1, 8))}))
    "input ['ids'] of shape (1, 8)"
    """
    numpy: Any = sys.modules.get("numpy")
    return "" if numpy is None else _inputs_text(inputs, lambda value: isinstance(value, numpy.ndarray))


def advice_on(inputs: Any) -> str:
    """Return advice for a model that fails with these arguments; empty if there is none.

    >>> import torch
    >>> advice_on(((torch.zeros(8, dtype=torch.long),), {}))
    'input [0] of shape (8,) has no batch dimension: if the model takes batches of sequences, give tensor[None]'
    """
    if arrays := numpy_inputs_text(inputs):
        return f"{arrays} {'are numpy arrays' if ', input' in arrays else 'is a numpy array'}: {AS_TENSORS}"
    single = _inputs_text(inputs, lambda value: isinstance(value, Tensor) and value.dim() == 1 and _has_token_ids(value))
    return NO_BATCH.format(found=single) if single else ""


def _has_token_ids(tensor: Tensor) -> bool:
    """Return whether a tensor holds several integers."""
    return tensor.numel() > 1 and not tensor.is_floating_point() and not tensor.is_complex()


def _inputs_text(inputs: Any, predicate: Callable[[Any], bool]) -> str:
    """Return names and shapes of the inputs that satisfy the predicate, as text."""
    matches = [(path, value) for path, value in tree_flatten_with_path(inputs)[0] if predicate(value)]
    return ", ".join(f"input {keystr(path[1:])} of shape {tuple(value.shape)}" for path, value in matches)
