"""`streamfx.plan`: predict the memory and cost of a training step for a model of any size, on any machine."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import nn

from streamfx.argument_checks import as_python_number, check_call, choices_hint, describe_value, did_you_mean, require
from streamfx.budget import FORMS, amount_text, budget_bytes, is_budget, parse_amount
from streamfx.errors import OptionError, OverBudgetError, PlanError
from streamfx.frontend.gc_pause import pause_gc
from streamfx.options import NAMES, Options, merge_options, min_save_level, resolve_options
from streamfx.tools.inspect.side_effect_guard import serialized
from streamfx.tools.planner.context import check_heads, check_plan
from streamfx.tools.planner.devices import device_by_name, local_device
from streamfx.tools.planner.host_weights import HostWeights
from streamfx.tools.planner.inputs import Inputs, check_inputs
from streamfx.tools.planner.model_names import DEVICES, GROUP, OBJECTIVES, OPTIMIZERS, SCHEMES, SHARDS
from streamfx.tools.planner.models import TYPES, build_model
from streamfx.tools.planner.objectives import objective_by_name
from streamfx.tools.planner.offload_argument import PARAMETERS, Check, checks_of_host_weights, split_offload
from streamfx.tools.planner.overlap import devices_per_host
from streamfx.tools.planner.predict import Prediction
from streamfx.tools.planner.remedies import Planner, advice
from streamfx.tools.planner.report import PlanReport
from streamfx.tools.planner.search import Limits
from streamfx.tools.planner.shards import ZERO1, Sharding, state_bytes
from streamfx.tools.planner.step import TrainingStep
from streamfx.tools.planner.table import LengthTable, length_table

CHOICES = {  # argument: its values, and the error for another name
    "dtype": (tuple(TYPES), "there is no dtype {!r} to plan for"),
    "quantize": (SCHEMES, "there is no quantization {!r}"),
    "optimizer": (OPTIMIZERS, "there is no optimizer {!r} to plan for"),
    "shard": (SHARDS, "there is no sharding {!r}"),
    "objective": (OBJECTIVES, "there is no objective {!r} to plan for"),
}
SWITCHES = ("optimizer_in_backward", "max_length", "max_batch", "frontier", "baselines")
MINIMA = {"seq": 2, "batch": 1, "group": 1, "lora_rank": 1, "world": 1, "tensor": 1, "context": 1}
FUNCTIONS = {
    "inputs": "give inputs=, a function of (batch, length) that returns the model's arguments by name",
    "noted": "give a function that gets each prediction",
}


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
    offload: str | Sequence[str] = (),
    world: int = 1,
    shard: str = "ddp",
    tensor: int = 1,
    context: int = 1,
    max_length: bool = False,
    max_batch: bool = False,
    frontier: bool = False,
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
        device, memory, host_memory: "H100" or another, or "here"; its memory ("80G"), and that of a host with up to 8 devices.
        dtype, lora_rank, quantize: dtype of parameters; rank of adapters; "nf4", "int8" or "fp8" for frozen weights of layers.
        optimizer, optimizer_in_backward: "adamw", "sgd", "none" and others; whether it frees gradients in the backward pass.
        offload: values on the host: "inputs" or "attention" (the option), "parameters" (FSDP2's `CPUOffloadPolicy`), or both.
        world, shard: devices, which shard nothing ("ddp"), the state ("zero1"), gradients ("zero2"), or weights, too ("zero3").
        tensor, context: how many of them for tensor parallelism (by the configuration's plan) and context parallelism (Ulysses).
        objective, group: "sft"; "dpo", for `batch` pairs; "grpo", for `batch` groups of `group` answers; both with a reference.
        frontier, baselines, noted: whether to list plans up to the fastest step, and trace baselines; a callback for predictions.
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
    given = {name: as_python_number(value) for name, value in locals().items() if name not in ("options", "keywords")}
    return _run_or_advise(_request(given, _backend_options(options, keywords)))


@serialized
def plan_table(model: Any, *, options: Mapping[str, Any] | Options | None = None, **arguments: Any) -> LengthTable:
    """Return the longest sequences of a model by card and by way of training. It takes the arguments of `plan`.

    Raises:
        PlanError, OptionError: the request is invalid.
    """
    return length_table(_request({**_defaults(), **arguments, "model": model}, _backend_options(options, {})), step_of)


def _request(arguments: Mapping[str, Any], options: Mapping[str, Any]) -> SimpleNamespace:
    """Return the arguments of `plan`; of `offload`, the values of the option are among the options."""
    on_host, options = split_offload(arguments["offload"], options)
    offload = PARAMETERS if on_host else ()
    return SimpleNamespace(**{**arguments, "offload": offload, "on_host": on_host, "options": options})


def _defaults() -> dict[str, Any]:
    """Return the default values of the arguments of `plan`."""
    return {name: parameter.default for name, parameter in inspect.signature(plan).parameters.items()}


def _run_or_advise(request: SimpleNamespace) -> PlanReport:
    """Run a request. If it does not fit, the text of the error has a command that fits, which is searched for when it is read."""
    try:
        return _run_request(copy(request))
    except OverBudgetError as refusal:
        if request.memory is not None or request.host_memory is not None:  # else the budget is an option: its remedy stays
            planner = Planner(limits_of, lambda changed: _run_request(changed).prediction, _predict_least)
            refusal.advise = partial(serialized(advice), refusal, request, planner, _defaults())
        raise


def _run_request(request: SimpleNamespace) -> PlanReport:
    """Predict one step, or search for the largest."""
    step, limits = step_of(request), limits_of(request)
    arguments = limits, request.options, request.batch, request.seq, request.baselines
    if request.max_length or request.max_batch:
        return step.searched(*arguments, request.max_batch, allow_few_layers=not isinstance(request.model, nn.Module))
    return step.planned(*arguments, request.frontier)


def step_of(request: SimpleNamespace) -> TrainingStep:
    """Check the arguments of `plan`, and build the model on the meta device."""
    for is_refused, asked, found, do in chain(_checks_of_values(request), _checks_of_combinations(request)):
        require(not is_refused, PlanError, asked, found, do)
    objective = objective_by_name(request.objective, request.group)
    ranks = Sharding(request.world, request.shard, request.tensor, request.context)
    with pause_gc():
        model = objective.step(build_model(request.model, request.dtype, request.lora_rank, request.quantize))
    name = Path(request.model).name if isinstance(request.model, str) else type(model).__name__
    _check_takes_ids(request)
    if request.inputs is not None:
        check_inputs(request.inputs, request.batch, request.seq, request.max_batch)
    if ranks.near > 1:
        check_heads(model, request.tensor, request.context)
    if request.tensor > 1:
        check_plan(model)
    optimizer_bytes = state_bytes(model, request.optimizer, ranks)
    device = device_by_name(request.device)
    updates, weights = request.optimizer_in_backward, None
    if request.on_host:
        request.baselines = False  # they have all weights on the device
        state = None if request.optimizer == "none" else optimizer_bytes
        weights = HostWeights.of(model, state, updates, is_pinned=device.kind.type == "cuda")
        request.options = {"save": min_save_level(request.options.get("offload", "none")), **request.options, "keep_every": 1}
    optimizer, inputs, noted = request.optimizer, request.inputs, request.noted
    return TrainingStep(name, model, objective, device, inputs, optimizer, optimizer_bytes, noted, ranks, updates, weights)


def limits_of(request: SimpleNamespace) -> Limits:
    """Return the memory of a device, and the share of each device in the memory of a host."""
    memory, host = (None if size is None else _bytes_of(size) for size in (request.memory, request.host_memory))
    given = "" if memory is None else amount_text(request.memory, memory)
    return Limits(memory, None if host is None else host // devices_per_host(request.world), given)


def _predict_least(request: SimpleNamespace, rows: int | None) -> Prediction:
    """Predict the plan with the least memory, with chunks of so many rows or of the usual number."""
    step = step_of(request)
    return step.least(request.batch, request.seq, request.options, rows)


def _bytes_of(size: int | float | str) -> int:
    """Return the bytes of an amount; a share is one of this machine's device."""
    return budget_bytes(size, local_device())


def _backend_options(options: Any, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the backend's options. An unknown name may be a misspelled argument, so the error suggests both."""
    for name in keywords.keys() - set(NAMES):
        names = [*inspect.signature(plan).parameters, *NAMES]
        hint = did_you_mean(name, names)
        asked = f"streamfx.plan(...) has no argument {name!r}, and the backend no such option"
        raise OptionError(asked, found=f"{name}={keywords[name]!r}", do=f"{hint}help(streamfx.plan) lists them")
    return merge_options(options, keywords, "streamfx.plan(...)")


def _checks_of_values(request: SimpleNamespace) -> Iterator[Check]:
    """Yield checks of single arguments: known names, switches that are booleans, callable callbacks, sizes large enough."""
    for name, (choices, asked) in CHOICES.items():
        value, do = getattr(request, name), choices_hint(getattr(request, name), choices)
        is_omitted = value is None and name == "quantize"
        yield not isinstance(value, str) and not is_omitted, f"{name} cannot be {describe_value(value)}", "", do
        yield value not in choices and not is_omitted, asked.format(value), "", do
    do = choices_hint(request.device, (*DEVICES, "here"))
    yield not isinstance(request.device, str), f"device cannot be {describe_value(request.device)}", "", do
    for name in SWITCHES:
        value = getattr(request, name)
        yield not isinstance(value, bool), f"{name} cannot be {describe_value(value)}", "", "give True or False"
    for name, do in FUNCTIONS.items():
        value = getattr(request, name)
        yield value is not None and not callable(value), f"{name} cannot be {describe_value(value)}", "", do
    yield not is_budget(request.memory), f"memory cannot be {request.memory!r}", "", f"give {FORMS}"
    is_size = request.host_memory is None or isinstance(parse_amount(request.host_memory), int)
    yield not is_size, f"host_memory cannot be {request.host_memory!r}", "", "give bytes, or a text like '1TiB' or '1T'"
    for name, minimum in MINIMA.items():
        value = getattr(request, name)
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= minimum
        is_count |= value is None and name == "lora_rank"
        yield not is_count, f"{name} cannot be {value!r}", "", f"give a whole number, {minimum} or more"


def _checks_of_combinations(request: SimpleNamespace) -> Iterator[Check]:
    """Yield checks of contradictory limits, searches, arguments without an effect, and parts that ranks cannot split."""
    memory, budget = request.memory, request.options.get("memory_budget")
    differ = memory is not None and budget is not None and parse_amount(memory) != parse_amount(budget)
    found = f"memory={memory!r} and memory_budget={budget!r}"
    yield differ, "memory and memory_budget contradict each other", found, "give only memory="
    asked = "max_length and max_batch cannot be combined"
    yield request.max_length and request.max_batch, asked, "", "give one of them"
    is_searched, asked = request.max_length or request.max_batch, "max_length" if request.max_length else "max_batch"
    yield is_searched and memory is None, f"{asked} needs a limit of memory", "", "give memory, as in memory='80GiB'"
    is_limited = is_searched or memory is not None or budget is not None
    asked, found = "a frontier has plans for all budgets", "a memory limit, or a search for the largest step"
    yield request.frontier and is_limited, asked, found, "omit frontier, or the limit"
    asked = "group has no effect: it is the number of answers per prompt in grpo"
    objective = f"the objective {request.objective!r}"
    found, do = f"group={request.group}, and {objective}", "plan the objective 'grpo', or omit group"
    yield request.group != GROUP and request.objective != "grpo", asked, found, do
    offload = "none" if request.host_memory is None else resolve_options(request.options).offload
    found = f"host_memory={request.host_memory!r}, and offload={offload!r}"
    do = "give offload='inputs' (--offload), 'attention' or 'parameters', or omit host_memory"
    asked = "host_memory has no effect: it limits offloaded values"
    yield request.host_memory is not None and offload == "none" and not request.on_host, asked, found, do
    if request.on_host:
        yield from checks_of_host_weights(request)
    world, shard, tensor, context = request.world, request.shard, request.tensor, request.context
    asked = f"tensor={tensor} times context={context} must divide the number of devices"
    yield world % (tensor * context) != 0, asked, f"a world of {world}", f"give a multiple of {tensor * context}"
    do = "give their number, as in --world 8"
    yield world == 1 and shard != SHARDS[0], f"{shard} needs several devices", "a world of 1", do
    asked, found = f"context={context} must divide the sequence", f"seq={request.seq}"
    yield request.seq % context != 0, asked, found, f"give a multiple of {context}"
    found, do = "custom inputs" if request.inputs is not None else objective, "plan the objective 'sft', or context=1"
    is_other = request.objective != "sft"
    asked = "context applies to sequences of ids and labels"
    yield context > 1 and (request.inputs is not None or is_other), asked, found, do
    is_modified = bool(request.lora_rank or request.quantize)
    found, do = "adapters, or quantized weights" if is_modified else objective, "plan all parameters and 'sft', or tensor=1"
    yield tensor > 1 and (is_modified or is_other), "tensor splits the layers of a configuration", found, do
    asked, updates = "optimizer_in_backward cannot be planned", request.optimizer_in_backward
    yield updates and request.optimizer == "none", asked, "no optimizer", f"give one of {', '.join(OPTIMIZERS[1:])}"
    found = "zero1, which gathers updated parameters after the step"
    yield updates and shard == ZERO1, asked, found, "plan with ddp, zero2 or zero3"


def _check_takes_ids(request: SimpleNamespace) -> None:
    """Check that a custom model accepts token ids by name if no function returns its inputs."""
    names = ("input_ids", "labels") if request.objective == "sft" else ("input_ids",)
    if not isinstance(request.model, nn.Module) or request.inputs is not None:
        return
    try:
        inspect.signature(request.model.forward).bind(**dict.fromkeys(names))
    except TypeError as error:
        called = f"without inputs=, the plan calls the model with {' and '.join(names)}"
        raise PlanError(called, found=f"{type(request.model).__name__}.forward: {error}", do=FUNCTIONS["inputs"]) from None
