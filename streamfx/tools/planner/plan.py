"""`streamfx.plan`: predict the memory and cost of a training step for a model of any size, on any machine."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from streamfx.argument_checks import as_python_number, check_call, choices_hint, describe_value, did_you_mean
from streamfx.budget import FORMS, budget_bytes, is_budget, parse_amount
from streamfx.errors import OptionError, PlanError
from streamfx.frontend.gc_pause import uncollected
from streamfx.options import NAMES, Options, merge_options, resolve_options
from streamfx.tools.inspect.lock import serialized
from streamfx.tools.planner.context import check_heads
from streamfx.tools.planner.devices import device_by_name, local_device
from streamfx.tools.planner.host_memory import devices_per_host
from streamfx.tools.planner.inputs import Inputs, check_inputs
from streamfx.tools.planner.model_names import DEVICES, GROUP, OBJECTIVES, OPTIMIZERS, SCHEMES, SHARDS
from streamfx.tools.planner.models import TYPES, build_model
from streamfx.tools.planner.objectives import objective_by_name
from streamfx.tools.planner.optimizers import UPDATING, state_bytes
from streamfx.tools.planner.predict import Prediction
from streamfx.tools.planner.report import PlanReport
from streamfx.tools.planner.search import Limits
from streamfx.tools.planner.shards import ZERO1, Sharding, checked_sharding
from streamfx.tools.planner.step import StepSearch, TrainingStep
from streamfx.tools.planner.tensors import check_plan

CHOICES = {
    "dtype": tuple(TYPES),
    "quantize": SCHEMES,
    "optimizer": OPTIMIZERS,
    "shard": SHARDS,
    "objective": OBJECTIVES,
    "device": (*DEVICES, "here"),
}
SWITCHES = ("optimizer_in_backward", "max_length", "max_batch", "baselines")
FUNCTIONS = {
    "inputs": "give inputs=, a function of (batch, length) that returns the model's arguments by name",
    "noted": "give a function that gets each prediction",
}


@dataclass(frozen=True)
class PlanRequest:
    """The arguments of `plan`, documented there."""

    model: Any
    seq: int
    batch: int
    memory: int | float | str | None
    host_memory: int | str | None
    dtype: str
    lora_rank: int | None
    quantize: str | None
    optimizer: str
    optimizer_in_backward: bool
    world: int
    shard: str
    tensor: int
    context: int
    max_length: bool
    max_batch: bool
    device: str
    baselines: bool
    objective: str
    group: int
    inputs: Inputs | None
    options: Mapping[str, Any]
    noted: Callable[[Prediction], None] | None


@check_call(PlanError, "streamfx.plan(...)")
@serialized
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
    group: int = GROUP,
    inputs: Inputs | None = None,
    options: Mapping[str, Any] | Options | None = None,
    noted: Callable[[Prediction], None] | None = None,
    **keywords: Any,
) -> PlanReport:
    """Predict a training step, and the longest length or largest batch that fits into `memory`; nothing is computed.

    Args:
        model: a Hugging Face configuration (an object, a mapping, a folder, a JSON file, `org/name` of the local cache,
            a built-in name), or a model on the meta device that returns a loss or logits.
        inputs: a function of (batch, length) that returns the arguments of a custom model, tensors of these sizes by name.
        seq, batch, max_length, max_batch: tokens and sequences per device; whether to find the largest that fit.
        memory, host_memory: of a device ("80G"), and of a host with up to 8 devices for offloaded stage inputs.
        dtype, lora_rank, quantize: dtype of parameters; rank of adapters; "nf4", "int8" or "fp8" for frozen weights of layers.
        optimizer, optimizer_in_backward: "adamw", "adamw8bit", "sgd", "none"; whether it frees gradients in the backward pass.
        world, shard: devices, which shard nothing ("ddp"), the state ("zero1"), gradients ("zero2"), or weights, too ("zero3").
        tensor, context: how many of them for tensor parallelism (by the configuration's plan) and context parallelism (Ulysses).
        device: the device whose kernels and rates apply: "H100" and others, or "here".
        objective, group: "sft"; "dpo", for `batch` pairs; "grpo", for `batch` groups of `group` answers; both with a reference.
        baselines, noted: whether to trace the baselines, too; a callback for each prediction.
        options, keywords: the backend's options, as a dictionary or `streamfx.Options`, and by their names.
    Returns:
        The report: it prints as a page, and `summary()` is a dictionary.
    Raises:
        PlanError, OptionError: the request is invalid.
        OverBudgetError: nothing fits into `memory`.
    Example:
        >>> import torch, streamfx
        >>> class Mean(torch.nn.Linear):
        ...     def forward(self, x): return torch.nn.functional.linear(x, self.weight).square().mean()
        >>> inputs = lambda batch, length: {"x": torch.empty(batch, length, 64, device="meta")}
        >>> streamfx.plan(Mean(64, 64, device="meta"), seq=1024, inputs=inputs).prediction.length
        1024
    """
    backend_options = _backend_options(options, keywords)
    head = (model, seq, batch, memory, host_memory, dtype, lora_rank, quantize, optimizer, optimizer_in_backward, world, shard)
    rest = (tensor, context, max_length, max_batch, device, baselines, objective, group, inputs, backend_options, noted)
    return _run_request(PlanRequest(*map(as_python_number, (*head, *rest))))


def _run_request(request: PlanRequest) -> PlanReport:
    """Check the request, build the model on the meta device, and predict one step or search for the largest."""
    _check_kinds(request)
    _check_dtype_and_memory(request.dtype, request.memory)
    _check_host_memory(request.host_memory)
    _check_budgets(request.memory, request.options)
    _check_counts(seq=(request.seq, 2), batch=(request.batch, 1), group=(request.group, 1))
    _check_counts(lora_rank=(1 if request.lora_rank is None else request.lora_rank, 1))
    _check_counts(world=(request.world, 1), tensor=(request.tensor, 1), context=(request.context, 1))
    _check_search(request.memory, request.max_length, request.max_batch)
    objective = objective_by_name(request.objective, request.group)
    _check_has_effect(request)
    ranks = checked_sharding(request.world, request.shard, request.tensor, request.context)
    _check_context_divides(request.context, request.seq)
    _check_parallelism(ranks, request.objective, request.inputs, request.lora_rank or request.quantize)
    _check_updates(request.optimizer_in_backward, request.optimizer, ranks)
    with uncollected():
        model = objective.step(build_model(request.model, request.dtype, request.lora_rank, request.quantize))
    name = Path(request.model).name if isinstance(request.model, str) else type(model).__name__
    _check_takes_ids(request.model, request)
    if request.inputs is not None:
        check_inputs(request.inputs, request.batch, request.seq, request.max_batch)
    _check_model(model, request.tensor, request.context)
    optimizer_bytes = state_bytes(model, request.optimizer, ranks)
    device = device_by_name(request.device)
    step = TrainingStep(
        name, model, objective, device, request.inputs, optimizer_bytes, request.noted, ranks, request.optimizer_in_backward
    )
    limits = _limits(request.memory, request.host_memory, request.world)
    if request.max_length or request.max_batch:
        allow_few_layers = not isinstance(request.model, nn.Module)
        return step.searched(
            limits,
            request.options,
            StepSearch(request.batch, request.seq, request.max_batch, allow_few_layers, request.baselines),
        )
    return step.planned(limits, request.options, request.batch, request.seq, request.baselines)


def _backend_options(options: Any, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the backend's options. An unknown name may be a misspelled argument, so the error suggests both."""
    for name in keywords.keys() - set(NAMES):
        names = [*inspect.signature(plan).parameters, *NAMES]
        hint = did_you_mean(name, names)
        asked = f"streamfx.plan(...) has no argument {name!r}, and the backend no such option"
        raise OptionError(asked, found=f"{name}={keywords[name]!r}", do=f"{hint}help(streamfx.plan) lists them")
    return merge_options(options, keywords, "streamfx.plan(...)")


def _limits(memory: Any, host_memory: Any, world: int) -> Limits:
    """Return the limit of a device, and of the host memory per device."""
    device = None if memory is None else budget_bytes(memory, local_device())
    return Limits(device, None if host_memory is None else budget_bytes(host_memory, local_device()) // devices_per_host(world))


def _check_model(model: nn.Module, tensor: int, context: int) -> None:
    """Check that the heads can be split among devices, and that the layers have a tensor-parallel plan."""
    if tensor * context > 1:
        check_heads(model, tensor, context)
    if tensor > 1:
        check_plan(model)


def _check_host_memory(size: Any) -> None:
    """Refuse a host memory that is not a number of bytes."""
    if size is not None and not isinstance(parse_amount(size), int):
        raise PlanError(f"host_memory cannot be {size!r}", do="give bytes, or a text like '1TiB' or '1T'")


def _check_has_effect(request: PlanRequest) -> None:
    """Refuse arguments that would have no effect."""
    if request.group != GROUP and request.objective != "grpo":
        found = f"group={request.group}, and the objective {request.objective!r}"
        do = "plan the objective 'grpo', or omit group"
        raise PlanError("group has no effect: it is the number of answers per prompt in grpo", found=found, do=do)
    if request.host_memory is not None and (offload := resolve_options(request.options).offload) == "none":
        found = f"host_memory={request.host_memory!r}, and offload={offload!r}"
        do = "give offload='inputs' (--offload) or 'attention', or omit host_memory"
        raise PlanError("host_memory has no effect: it limits offloaded values", found=found, do=do)


def _check_search(memory: Any, max_length: bool, max_batch: bool) -> None:
    """Refuse two searches at once, and a search without a limit."""
    if max_length and max_batch:
        raise PlanError("max_length and max_batch cannot be combined", do="give one of them")
    if (max_length or max_batch) and memory is None:
        name = "max_length" if max_length else "max_batch"
        raise PlanError(f"{name} needs a limit of memory", do="give memory, as in memory='80GiB'")


def _check_dtype_and_memory(dtype: Any, memory: Any) -> None:
    """Refuse an unknown dtype, and a memory that is not a budget."""
    if dtype not in TYPES:
        raise PlanError(f"there is no dtype {dtype!r} to plan for", do=choices_hint(dtype, TYPES))
    if not is_budget(memory):
        raise PlanError(f"memory cannot be {memory!r}", do=f"give {FORMS}")


def _check_kinds(request: PlanRequest) -> None:
    """Check the types of arguments before any lookup: names are strings, switches are booleans, callbacks are callable."""
    for name, choices in CHOICES.items():
        value = getattr(request, name)
        if not isinstance(value, str) and not (value is None and name == "quantize"):
            raise PlanError(f"{name} cannot be {describe_value(value)}", do=choices_hint(value, choices))
    for name in SWITCHES:
        if not isinstance(value := getattr(request, name), bool):
            raise PlanError(f"{name} cannot be {describe_value(value)}", do="give True or False")
    for name, do in FUNCTIONS.items():
        if (value := getattr(request, name)) is not None and not callable(value):
            raise PlanError(f"{name} cannot be {describe_value(value)}", do=do)


def _check_takes_ids(model: Any, request: PlanRequest) -> None:
    """Check that a custom model accepts token ids by name if no function returns its inputs."""
    names = ("input_ids", "labels") if request.objective == "sft" else ("input_ids",)
    if not isinstance(model, nn.Module) or request.inputs is not None:
        return
    try:
        inspect.signature(model.forward).bind(**dict.fromkeys(names))
    except TypeError as error:
        called = f"without inputs=, the plan calls the model with {' and '.join(names)}"
        raise PlanError(called, found=f"{type(model).__name__}.forward: {error}", do=FUNCTIONS["inputs"]) from None


def _check_budgets(memory: Any, options: Mapping[str, Any]) -> None:
    """Refuse contradictory values of `memory` and `memory_budget`."""
    budget = options.get("memory_budget")
    if memory is not None and budget is not None and parse_amount(memory) != parse_amount(budget):
        found = f"memory={memory!r} and memory_budget={budget!r}"
        raise PlanError("memory and memory_budget contradict each other", found=found, do="give only memory=")


def _check_updates(in_backward: bool, optimizer: str, ranks: Sharding) -> None:
    """Refuse an optimizer in the backward pass if there is none, or if zero1 gathers parameters after the step."""
    if in_backward and optimizer == "none":
        found = "no optimizer"
        raise PlanError("optimizer_in_backward cannot be planned", found=found, do=f"give one of {', '.join(UPDATING)}")
    if in_backward and ranks.shard == ZERO1:
        found = "zero1, which gathers updated parameters after the step"
        raise PlanError("optimizer_in_backward cannot be planned", found=found, do="plan with ddp, zero2 or zero3")


def _check_context_divides(context: int, seq: int) -> None:
    """Refuse a sequence length that the ranks of context parallelism do not divide."""
    if seq % context:
        raise PlanError(f"context={context} must divide the sequence", found=f"seq={seq}", do=f"give a multiple of {context}")


def _check_parallelism(ranks: Sharding, objective: str, inputs: Any, is_modified: Any) -> None:
    """Refuse combinations that cannot be split: modified models, custom inputs, and losses across positions."""
    if ranks.context > 1 and (inputs is not None or objective != "sft"):
        found = "custom inputs" if inputs is not None else f"the objective {objective!r}"
        raise PlanError(
            "context applies to sequences of ids and labels", found=found, do="plan the objective 'sft', or context=1"
        )
    if ranks.tensor > 1 and (is_modified or objective != "sft"):
        found = "adapters, or quantized weights" if is_modified else f"the objective {objective!r}"
        raise PlanError(
            "tensor splits the layers of a configuration", found=found, do="plan all parameters and 'sft', or tensor=1"
        )


def _check_counts(**counts: tuple[Any, int]) -> None:
    """Refuse numbers that are not integers of at least their minimum; each count is (value, minimum)."""
    for name, (value, minimum) in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise PlanError(f"{name} cannot be {value!r}", do=f"give a whole number, {minimum} or more")
