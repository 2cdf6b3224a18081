"""`streamfx.plan`: predict the memory and cost of a training step for a model of any size, on any machine."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from streamfx.argument_checks import as_python_number, check_call, choices_hint, describe_value, did_you_mean, require
from streamfx.budget import FORMS, budget_bytes, is_budget, parse_amount
from streamfx.errors import OptionError, PlanError
from streamfx.frontend.gc_pause import pause_gc
from streamfx.options import NAMES, Options, merge_options, resolve_options
from streamfx.tools.inspect.lock import serialized
from streamfx.tools.planner.context import check_heads, check_plan
from streamfx.tools.planner.devices import device_by_name, local_device
from streamfx.tools.planner.inputs import Inputs, check_inputs
from streamfx.tools.planner.model_names import DEVICES, GROUP, OBJECTIVES, OPTIMIZERS, SCHEMES, SHARDS
from streamfx.tools.planner.models import TYPES, build_model
from streamfx.tools.planner.objectives import objective_by_name
from streamfx.tools.planner.overlap import devices_per_host
from streamfx.tools.planner.predict import Prediction
from streamfx.tools.planner.report import PlanReport
from streamfx.tools.planner.search import Limits
from streamfx.tools.planner.shards import UPDATING, ZERO1, Sharding, checked_sharding, state_bytes
from streamfx.tools.planner.step import StepSearch, TrainingStep

CHOICES = {
    "dtype": tuple(TYPES),
    "quantize": SCHEMES,
    "optimizer": OPTIMIZERS,
    "shard": SHARDS,
    "objective": OBJECTIVES,
    "device": (*DEVICES, "here"),
}
SWITCHES = ("optimizer_in_backward", "max_length", "max_batch", "baselines")
MINIMA = {"seq": 2, "batch": 1, "group": 1, "lora_rank": 1, "world": 1, "tensor": 1, "context": 1}
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
    given = {name: as_python_number(value) for name, value in locals().items() if name != "keywords"}
    return _run_request(PlanRequest(**{**given, "options": _backend_options(options, keywords)}))


def _run_request(request: PlanRequest) -> PlanReport:
    """Check the request, build the model on the meta device, and predict one step or search for the largest."""
    _check_values(request)
    objective = objective_by_name(request.objective, request.group)
    _check_combinations(request)
    ranks = checked_sharding(request.world, request.shard, request.tensor, request.context)
    _check_ranks(request, ranks)
    with pause_gc():
        model = objective.step(build_model(request.model, request.dtype, request.lora_rank, request.quantize))
    name = Path(request.model).name if isinstance(request.model, str) else type(model).__name__
    _check_takes_ids(request)
    if request.inputs is not None:
        check_inputs(request.inputs, request.batch, request.seq, request.max_batch)
    if request.tensor * request.context > 1:
        check_heads(model, request.tensor, request.context)
    if request.tensor > 1:
        check_plan(model)
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


def _check_values(request: PlanRequest) -> None:
    """Check each argument before any lookup: names are strings, switches booleans, callbacks callable, sizes large enough."""
    for name, choices in CHOICES.items():
        value = getattr(request, name)
        is_name = isinstance(value, str) or (value is None and name == "quantize")
        require(is_name, PlanError, f"{name} cannot be {describe_value(value)}", "", choices_hint(value, choices))
    for name in SWITCHES:
        value = getattr(request, name)
        require(isinstance(value, bool), PlanError, f"{name} cannot be {describe_value(value)}", "", "give True or False")
    for name, do in FUNCTIONS.items():
        value = getattr(request, name)
        require(value is None or callable(value), PlanError, f"{name} cannot be {describe_value(value)}", "", do)
    asked = f"there is no dtype {request.dtype!r} to plan for"
    require(request.dtype in TYPES, PlanError, asked, "", choices_hint(request.dtype, TYPES))
    require(is_budget(request.memory), PlanError, f"memory cannot be {request.memory!r}", "", f"give {FORMS}")
    is_size = request.host_memory is None or isinstance(parse_amount(request.host_memory), int)
    do = "give bytes, or a text like '1TiB' or '1T'"
    require(is_size, PlanError, f"host_memory cannot be {request.host_memory!r}", "", do)
    for name, minimum in MINIMA.items():
        value = getattr(request, name)
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= minimum
        is_count |= value is None and name == "lora_rank"
        require(is_count, PlanError, f"{name} cannot be {value!r}", "", f"give a whole number, {minimum} or more")


def _check_combinations(request: PlanRequest) -> None:
    """Refuse contradictory limits, two searches at once, a search without a limit, and arguments without an effect."""
    memory, budget = request.memory, request.options.get("memory_budget")
    agree = memory is None or budget is None or parse_amount(memory) == parse_amount(budget)
    found = f"memory={memory!r} and memory_budget={budget!r}"
    require(agree, PlanError, "memory and memory_budget contradict each other", found, "give only memory=")
    asked = "max_length and max_batch cannot be combined"
    require(not (request.max_length and request.max_batch), PlanError, asked, "", "give one of them")
    is_searched, asked = request.max_length or request.max_batch, "max_length" if request.max_length else "max_batch"
    is_limited = memory is not None or not is_searched
    require(is_limited, PlanError, f"{asked} needs a limit of memory", "", "give memory, as in memory='80GiB'")
    asked = "group has no effect: it is the number of answers per prompt in grpo"
    found = f"group={request.group}, and the objective {request.objective!r}"
    has_effect = request.group == GROUP or request.objective == "grpo"
    require(has_effect, PlanError, asked, found, "plan the objective 'grpo', or omit group")
    offload = "none" if request.host_memory is None else resolve_options(request.options).offload
    found = f"host_memory={request.host_memory!r}, and offload={offload!r}"
    asked, do = (
        "host_memory has no effect: it limits offloaded values",
        "give offload='inputs' (--offload) or 'attention', or omit host_memory",
    )
    require(request.host_memory is None or offload != "none", PlanError, asked, found, do)


def _check_ranks(request: PlanRequest, ranks: Sharding) -> None:
    """Refuse what ranks cannot split: some lengths, modified models, custom inputs, losses across positions, some optimizers."""
    context, seq = request.context, request.seq
    require(
        seq % context == 0,
        PlanError,
        f"context={context} must divide the sequence",
        f"seq={seq}",
        f"give a multiple of {context}",
    )
    objective = f"the objective {request.objective!r}"
    found, do = "custom inputs" if request.inputs is not None else objective, "plan the objective 'sft', or context=1"
    is_split = context == 1 or (request.inputs is None and request.objective == "sft")
    require(is_split, PlanError, "context applies to sequences of ids and labels", found, do)
    is_modified = bool(request.lora_rank or request.quantize)
    found, do = "adapters, or quantized weights" if is_modified else objective, "plan all parameters and 'sft', or tensor=1"
    is_split = request.tensor == 1 or not (is_modified or request.objective != "sft")
    require(is_split, PlanError, "tensor splits the layers of a configuration", found, do)
    asked, in_backward = "optimizer_in_backward cannot be planned", request.optimizer_in_backward
    has_optimizer = not in_backward or request.optimizer != "none"
    require(has_optimizer, PlanError, asked, "no optimizer", f"give one of {', '.join(UPDATING)}")
    found = "zero1, which gathers updated parameters after the step"
    require(not (in_backward and ranks.shard == ZERO1), PlanError, asked, found, "plan with ddp, zero2 or zero3")


def _check_takes_ids(request: PlanRequest) -> None:
    """Check that a custom model accepts token ids by name if no function returns its inputs."""
    names = ("input_ids", "labels") if request.objective == "sft" else ("input_ids",)
    if not isinstance(request.model, nn.Module) or request.inputs is not None:
        return
    try:
        inspect.signature(request.model.forward).bind(**dict.fromkeys(names))
    except TypeError as error:
        called = f"without inputs=, the plan calls the model with {' and '.join(names)}"
        raise PlanError(called, found=f"{type(request.model).__name__}.forward: {error}", do=FUNCTIONS["inputs"]) from None
