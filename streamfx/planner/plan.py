"""`streamfx.plan`: what fits and what it costs, for a model of any size, on any machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from streamfx.budget import AUTO, bytes_of, is_budget
from streamfx.errors import PlanError
from streamfx.options import checked
from streamfx.planner.collector import uncollected
from streamfx.planner.context import check_heads
from streamfx.planner.devices import device_called, here
from streamfx.planner.host import sharing
from streamfx.planner.models import TYPES, built
from streamfx.planner.objectives import objective_called
from streamfx.planner.optimizers import UPDATING, state_bytes
from streamfx.planner.predict import Prediction
from streamfx.planner.report import PlanReport
from streamfx.planner.search import Limits
from streamfx.planner.shards import ZERO1, Sharding, checked_sharding
from streamfx.planner.step import Inputs, Step
from streamfx.planner.tensors import check_plan


def plan(
    model: Any,
    *,
    seq: int = 4096,
    batch: int = 1,
    memory: int | float | str | None = None,
    host_memory: int | str | None = None,
    dtype: str = "bfloat16",
    lora_rank: int | None = None,
    quantize: str | None = None,
    optimizer: str = "none",
    optimizer_in_backward: bool = False,
    world: int = 1,
    shard: str = "ddp",
    tensor: int = 1,
    context: int = 1,
    max_length: bool = False,
    max_batch: bool = False,
    device: str = "H100",
    baselines: bool = True,
    objective: str = "sft",
    group: int = 8,
    inputs: Inputs | None = None,
    options: Mapping[str, Any] | None = None,
    noted: Callable[[Prediction], None] | None = None,
) -> PlanReport:
    """Predict a training step: peak memory by term, FLOPs, time, and the longest length or largest batch that fits into `memory`.

    `model` is a Hugging Face configuration (an object, a mapping, a folder, a JSON file, or the name of one that is shipped)
    or a model on the meta device, which is called with `inputs(batch, length)` and returns its loss, or logits of the labels
    among these inputs. `objective` is what a step of a configuration's model computes: "sft"; "dpo", `batch` pairs of sequences
    and a reference model; "grpo", `batch` groups of `group` answers and a reference model. `quantize` freezes the model and keeps
    its layers' weights in "nf4", "int8" or "fp8", beside adapters of `lora_rank`. The state of `optimizer` ("adamw", "adamw8bit",
    "sgd", "none") is counted; with `optimizer_in_backward` it updates parameters in the backward pass, and frees their gradients.
    `world` devices run the step together, each with `batch` sequences of its own: with `shard` "ddp" each holds everything, with
    "zero1" they divide the state, with "zero2" also gradients, with "zero3" also parameters. `tensor` of them cut layers as the
    plan of their configuration says, `context` divide each sequence, and swap its rows for heads around attention (Ulysses).
    `host_memory` is what inputs of stages may take that wait on a host, which 8 devices share.
    `noted` is told each prediction. Nothing is computed.
    """
    _check(dtype, memory, inputs)
    _check_host_memory(host_memory)
    _check_counts(seq=(seq, 2), batch=(batch, 1), group=(group, 1), lora_rank=(lora_rank or 1, 1))
    _check_counts(world=(world, 1), tensor=(tensor, 1), context=(context, 1))
    _check_search(memory, max_length, max_batch)
    given, wanted = checked(options, "streamfx.plan(options=...)"), objective_called(objective, group)
    ranks = checked_sharding(world, shard, tensor, context)
    _check_rows(context, seq)
    _check_divided(ranks, objective, inputs, lora_rank or quantize)
    _check_updates(optimizer_in_backward, optimizer, ranks)
    with uncollected():
        made = wanted.step(built(model, dtype, lora_rank, quantize))
    name = Path(model).name if isinstance(model, str) else type(made).__name__
    _check_made(made, tensor, context)
    state = state_bytes(made, optimizer, ranks)
    step = Step(name, made, wanted, device_called(device), inputs, state, noted, ranks, optimizer_in_backward)
    limits = _limits(memory, host_memory, world)
    if max_length or max_batch:
        return step.searched(limits, given, batch, seq, max_batch, few=not isinstance(model, nn.Module))
    return step.planned(limits, given, batch, seq, baselines)


def _limits(memory: Any, host_memory: Any, world: int) -> Limits:
    """Of a device, and of a host for each of the devices that share it."""
    device = None if memory is None else bytes_of(memory, here())
    return Limits(device, None if host_memory is None else bytes_of(host_memory, here()) // sharing(world))


def _check_made(model: nn.Module, tensor: int, context: int) -> None:
    """Whether devices can divide its heads, and cut its layers."""
    if tensor * context > 1:
        check_heads(model, tensor, context)
    if tensor > 1:
        check_plan(model)


def _check_host_memory(size: Any) -> None:
    if size is not None and (isinstance(size, float) or size == AUTO or not is_budget(size)):
        raise PlanError(f"host_memory cannot be {size!r}", do="give bytes, or a text like '1TiB'")


def _check_search(memory: Any, max_length: bool, max_batch: bool) -> None:
    if max_length and max_batch:
        raise PlanError("the longest length and the largest batch are asked for at once", do="give one of them")
    if (max_length or max_batch) and memory is None:
        what = "longest length" if max_length else "largest batch"
        raise PlanError(f"the {what} is asked for, but not within which memory", do="give memory='80GiB'")


def _check(dtype: Any, memory: Any, inputs: Any) -> None:
    if dtype not in TYPES:
        raise PlanError(f"there is no type {dtype!r} to plan for", do=f"give one of {', '.join(TYPES)}")
    if not is_budget(memory):
        raise PlanError(
            f"memory cannot be {memory!r}",
            do="give bytes, a text like '80GiB', a share of the device between 0.0 and 1.0, or 'auto'",
        )
    if inputs is not None and not callable(inputs):
        raise PlanError(
            f"inputs cannot be a {type(inputs).__name__}",
            do="give a function of (batch, length) that returns what the model takes",
        )


def _check_updates(in_backward: bool, optimizer: str, ranks: Sharding) -> None:
    if in_backward and optimizer == "none":
        found = "none"
        raise PlanError("an optimizer is to run in the backward pass", found=found, do=f"give one of {', '.join(UPDATING)}")
    if in_backward and ranks.shard == ZERO1:
        found = "zero1, which gathers updated parameters behind the step"
        raise PlanError("an optimizer is to run in the backward pass", found=found, do="plan with ddp, zero2 or zero3")


def _check_rows(context: int, seq: int) -> None:
    if seq % context:
        raise PlanError(f"a sequence is divided among {context} devices", found=f"seq={seq}", do=f"give a multiple of {context}")


def _check_divided(ranks: Sharding, objective: str, inputs: Any, changed: Any) -> None:
    """Refuse what is cut by no plan or rows: models that were changed, inputs of one's own, losses that look at other rows."""
    if ranks.context > 1 and (inputs is not None or objective != "sft"):
        found = "inputs of your own" if inputs is not None else f"the objective {objective!r}"
        raise PlanError("context divides sequences of ids and labels", found=found, do="plan the objective 'sft', or context=1")
    if ranks.tensor > 1 and (changed or objective != "sft"):
        found = "adapters, or quantized weights" if changed else f"the objective {objective!r}"
        raise PlanError("tensor cuts the layers of a configuration", found=found, do="plan all parameters and 'sft', or tensor=1")


def _check_counts(**counts: tuple[Any, int]) -> None:
    for name, (value, least) in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise PlanError(f"{name} cannot be {value!r}", do=f"give a whole number, {least} or more")
