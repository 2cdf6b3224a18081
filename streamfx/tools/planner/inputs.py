"""What a function of the user's says that a model takes, at a batch and a length: tensors that are as long as was asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from streamfx.argument_checks import described, refuse_unless
from streamfx.errors import PlanError, told

Inputs = Callable[[int, int], Mapping[str, Tensor]]
BY_NAME = "let it take a batch and a length, and return a dictionary of tensors by name"
AS_ASKED = "let it make tensors of the batch and the length that it is given, as torch.empty(batch, length, device='meta') does"


def given_by(inputs: Inputs, batch: int, length: int) -> Mapping[str, Tensor]:
    """What the model takes of so many sequences of a length."""
    asked = f"inputs({batch}, {length}) says what the model takes"
    try:
        found = inputs(batch, length)
    except Exception as error:
        raise PlanError(asked, found=f"it raises {told(error)}", do=BY_NAME) from error
    by_name = isinstance(found, Mapping) and all(isinstance(name, str) for name in found)
    refuse_unless(by_name and bool(found), PlanError, asked, found, BY_NAME)
    other = [f"{name}={described(value)}" for name, value in found.items() if not isinstance(value, Tensor)]
    refuse_unless(not other, PlanError, asked, ", ".join(other), f"{BY_NAME}: torch.as_tensor(...)")
    return found


def check_inputs(inputs: Inputs, batch: int, length: int, max_batch: bool) -> None:
    """Refuses a function whose tensors are the same for half of the length: what is said of a length would be of another one.
    So it is with the batch, where more than one sequence, or the most of them, are asked for.
    """
    sizes = _sizes(given_by(inputs, batch, length))
    others = [("length", batch, length // 2)] + ([("batch", batch + 1, length)] if batch > 1 or max_batch else [])
    for what, *size in others:
        try:
            found = _sizes(given_by(inputs, *size))
        except PlanError:  # it may know no such length
            continue
        asked = f"inputs(batch, length) says what the model takes of a {what}"
        same = f"the same sizes from inputs({batch}, {length}) and inputs({size[0]}, {size[1]}): {_text(sizes)}"
        refuse_unless(found != sizes, PlanError, asked, same, AS_ASKED)


def _sizes(found: Mapping[str, Tensor]) -> dict[str, tuple[Any, ...]]:
    return {name: tuple(value.shape) for name, value in found.items()}


def _text(sizes: Mapping[str, tuple[Any, ...]]) -> str:
    return ", ".join(f"{name} of shape {shape}" for name, shape in sizes.items())
