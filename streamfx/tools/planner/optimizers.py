"""The state of optimizers: bytes kept from step to step."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from streamfx.argument_checks import choices_hint
from streamfx.errors import PlanError
from streamfx.tools.planner.shards import Sharding, rank_part

BLOCK = 256  # elements of an 8-bit state that share a float32 scale (Dettmers et al., 2022, section 2.1)

STATES: dict[str, Callable[[Tensor], int]] = {
    "none": lambda parameter: 0,
    "sgd": lambda parameter: 0,  # without momentum
    "adamw": lambda parameter: 2 * parameter.nbytes,
    "adamw8bit": lambda parameter: 2 * (parameter.numel() + 4 * -(-parameter.numel() // BLOCK)),
}
UPDATING = tuple(name for name in STATES if name != "none")


def state_bytes(model: nn.Module, optimizer: str, ranks: Sharding) -> int:
    """Return the bytes of the optimizer state of all trained parameters on one rank."""
    if optimizer not in STATES:
        raise PlanError(f"there is no optimizer {optimizer!r} to plan for", do=choices_hint(optimizer, STATES))
    with ranks.cut(model):
        trained = [rank_part(parameter) for parameter in model.parameters() if parameter.requires_grad]
        return -(-sum(map(STATES[optimizer], trained)) // ranks.holders)
