"""The code and the command that run a planned step: the line that turns streamfx on, the sharding, and the launch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamfx.cost.comm import DEVICES_PER_MACHINE
from streamfx.options import Options
from streamfx.tools.planner.shards import DDP, ZERO1, ZERO2, ZERO3, Sharding

ENGINES = {
    DDP: "model = DistributedDataParallel(model)",
    ZERO1: "model = DistributedDataParallel(model); ZeroRedundancyOptimizer(model.parameters(), ...)",
    ZERO2: "fully_shard(layer, reshard_after_forward=False) for each layer, then the same for the model",
    ZERO3: "fully_shard(layer) for each layer, then fully_shard(model)",
}
HOST_WEIGHTS = "fully_shard(layer, offload_policy=CPUOffloadPolicy()) for each layer, then the same for the model"
OPTIMIZERS = {
    "sgd": "torch.optim.SGD(model.parameters())",
    "adamw": "torch.optim.AdamW(model.parameters(), fused=True)",
    "adamw8bit": "bitsandbytes.optim.AdamW8bit(model.parameters())",
}
NO_PART_OF_A_STEP = ("check_passes", "progress")  # options of a session, not of the step


def recipe_of(
    options: Mapping[str, Any], ranks: Sharding, has_host_weights: bool = False, optimizer: str = "none"
) -> dict[str, Any]:
    """Return what to write for a planned step: `options`, `enable` or `compile`, `optimizer`, and for several devices `shard`
    and `launch`.

    `options` are all options of the planned step; only those without a default value are written. With weights on the host,
    `shard` says how they get there.
    """
    given = {name: value for name, value in Options(**options).given().items() if name not in NO_PART_OF_A_STEP}
    by_keyword = "".join(f", {name}={_literal(value)}" for name, value in given.items())
    by_name = ", ".join(f'"{name}": {_literal(value)}' for name, value in given.items())
    recipe = {
        "options": given,
        "enable": f"streamfx.enable(model{by_keyword})",
        "compile": f'torch.compile(model, backend="streambp"{f", options={{{by_name}}}" if given else ""})',
    }
    if optimizer in OPTIMIZERS:
        recipe["optimizer"] = f"optimizer = {OPTIMIZERS[optimizer]}"
    if has_host_weights:
        return {**recipe, "shard": HOST_WEIGHTS}
    if ranks.world == 1:
        return recipe
    return {**recipe, "shard": "; ".join(_sharding_steps(ranks)), "launch": _launch_command(ranks.world)}


def _literal(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _sharding_steps(ranks: Sharding) -> list[str]:
    """Return the steps that divide the model and its state among devices, in order."""
    steps = [f'from_pretrained(..., tp_plan="auto") over groups of {ranks.tensor}'] if ranks.tensor > 1 else []
    steps += [f"Ulysses over groups of {ranks.context} neighboring devices"] if ranks.context > 1 else []
    return [*steps, ENGINES[ranks.shard]]


def _launch_command(world: int) -> str:
    """Return the torchrun command for a number of devices, on machines with the most devices that divide it."""
    per_machine = max(size for size in range(1, DEVICES_PER_MACHINE + 1) if world % size == 0)
    machines = f"--nnodes {world // per_machine} --rdzv-backend c10d --rdzv-endpoint HOST:29500 " if world > per_machine else ""
    return f"torchrun {machines}--nproc-per-node {per_machine} train.py"
