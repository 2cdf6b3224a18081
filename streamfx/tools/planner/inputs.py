"""Inputs from a user function of batch and length, and checks that their shapes follow these arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from streamfx.argument_checks import describe_value, require
from streamfx.errors import PlanError, describe_error

Inputs = Callable[[int, int], Mapping[str, Tensor]]
BY_NAME = "let it take a batch size and a length, and return a dictionary of tensors by name"
SIZES = "let the tensors' sizes follow its arguments, as in torch.empty(batch, length, device='meta')"


def checked_inputs(inputs: Inputs, batch: int, length: int) -> Mapping[str, Tensor]:
    """Call the user function and check that it returns tensors by name."""
    asked = f"inputs({batch}, {length}) must return the model's arguments"
    try:
        tensors = inputs(batch, length)
    except Exception as error:
        raise PlanError(asked, found=f"it raises {describe_error(error)}", do=BY_NAME) from error
    by_name = isinstance(tensors, Mapping) and all(isinstance(name, str) for name in tensors)
    require(by_name and bool(tensors), PlanError, asked, tensors, BY_NAME)
    non_tensors = [f"{name}={describe_value(value)}" for name, value in tensors.items() if not isinstance(value, Tensor)]
    require(not non_tensors, PlanError, asked, ", ".join(non_tensors), f"{BY_NAME}: torch.as_tensor(...)")
    return tensors


def check_inputs(inputs: Inputs, batch: int, length: int, max_batch: bool) -> None:
    """Refuse a function whose shapes do not change if the length is halved: the plan would be for another length than requested.

    The same holds for the batch if it exceeds one sequence, or if the largest batch is requested.
    """
    sizes = _sizes(checked_inputs(inputs, batch, length))
    changed_arguments = [("length", batch, length // 2)] + ([("batch", batch + 1, length)] if batch > 1 or max_batch else [])
    for argument, *size in changed_arguments:
        try:
            changed_sizes = _sizes(checked_inputs(inputs, *size))
        except PlanError:  # the function may not support this length
            continue
        asked = f"inputs(batch, length) must depend on its {argument}"
        same_text = f"the same sizes from inputs({batch}, {length}) and inputs({size[0]}, {size[1]}): {_text(sizes)}"
        require(changed_sizes != sizes, PlanError, asked, same_text, SIZES)


def _sizes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Any, ...]]:
    return {name: tuple(value.shape) for name, value in tensors.items()}


def _text(sizes: Mapping[str, tuple[Any, ...]]) -> str:
    return ", ".join(f"{name} of shape {shape}" for name, shape in sizes.items())
