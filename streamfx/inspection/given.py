"""Tensors without elements among the arguments of a call: of what is computed of nothing there is nothing to say."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from streamfx.torch_private import keystr, tree_flatten_with_path

DO = "give a batch of at least one sequence, and sequences of at least one row"


def empty_among(inputs: Any) -> str:
    """The tensors without elements in the arguments of a call, as text; empty if there are none.

    >>> import torch
    >>> empty_among(((torch.zeros(2, 0),), {"labels": torch.zeros(2)}))
    'input [0] of shape (2, 0)'
    """
    found = [
        (path, value) for path, value in tree_flatten_with_path(inputs)[0] if isinstance(value, Tensor) and not value.numel()
    ]
    return ", ".join(f"input {keystr(path[1:])} of shape {tuple(value.shape)}" for path, value in found)
