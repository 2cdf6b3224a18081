"""A training step on each of several ranks: planned at one size, or at the largest size that fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from streamfx.budget import format_bytes
from streamfx.cost.categories import OPTIMIZER
from streamfx.cost.repeats import Repeat
from streamfx.errors import OverBudgetError, StreamFXError, describe_error
from streamfx.frontend.gc_pause import pause_gc
from streamfx.ir.facts import known
from streamfx.kernels.device_kinds import pretend_device
from streamfx.log import log
from streamfx.tools.inspect.eager import eager_cost, find_layer_repetition
from streamfx.tools.inspect.layers import first_layers, layers_of
from streamfx.tools.planner.baselines import Baseline, baselines_of, find_longest
from streamfx.tools.planner.context import part_of_a_sequence
from streamfx.tools.planner.devices import Device
from streamfx.tools.planner.host_weights import HostWeights
from streamfx.tools.planner.inputs import Inputs, checked_inputs
from streamfx.tools.planner.models import loss_of
from streamfx.tools.planner.objectives import Objective
from streamfx.tools.planner.predict import Prediction, predict, weight_bytes
from streamfx.tools.planner.report import PlanReport
from streamfx.tools.planner.search import (
    FIRST_LENGTH,
    LENGTH_MULTIPLE,
    OFFLOAD_LENGTH_FACTOR,
    Growth,
    Limits,
    SearchedSize,
    find_largest,
    gains_from,
    growth_of,
    with_least_memory,
)
from streamfx.tools.planner.shards import Sharding
from streamfx.tools.report.verdict import CHECKPOINTING, CHUNKED, IN_CHUNKS, MIN_GAIN, why_nothing_streams

FEW_LAYERS = 4  # layers; with fewer, no stage has the same neighbors as the inner stages of the full model


@dataclass(frozen=True)
class TrainingStep:
    """A training step of a model whose optimizer has `state` bytes. With `updates`, the optimizer runs in the backward pass.

    `noted` is called with each prediction. `host_weights` are weights on the host, if they are planned there.
    """

    name: str
    model: nn.Module
    objective: Objective
    device: Device
    inputs: Inputs | None
    state: int
    noted: Callable[[Prediction], None] | None
    ranks: Sharding
    updates: bool = False
    host_weights: HostWeights | None = None

    def at(
        self,
        batch: int,
        length: int,
        options: Mapping[str, Any],
        baselines: bool = False,
        chunked: bool = True,
        with_frontier: bool = False,
    ) -> Prediction:
        """Predict a step. `chunked` adds the baseline of checkpointing with a chunked loss, which is slow to trace."""
        inputs = self._inputs(batch, length)
        with pretend_device(self.device.kind), pause_gc(), self.ranks.divided(self.model) as model:
            in_chunks = baselines_of(model).get(IN_CHUNKS) if self._has_baselines and chunked else None
            extra_baselines = {} if in_chunks is None else {CHUNKED: in_chunks}
            prediction = predict(
                model,
                inputs,
                length,
                {**self.ranks.options, **options},
                baselines,
                self.state,
                self.updates,
                extra_baselines,
                with_frontier,
                self.host_weights,
            )
        if self.inputs is not None:  # the first custom input may lack a batch dimension
            prediction = replace(prediction, batch=batch)
        if self.noted is not None:
            self.noted(prediction)
        return prediction

    @property
    def _has_baselines(self) -> bool:
        """Whether all baselines can be traced: on one device, with ids and labels as inputs."""
        return self.ranks.world == 1 and self.inputs is None and self.objective.sequences == 1

    def _inputs(self, batch: int, length: int) -> Mapping[str, Tensor]:
        """Return the inputs of one rank for a batch and a length."""
        if self.ranks.context > 1:
            return part_of_a_sequence(batch, length // self.ranks.context)
        if self.inputs is not None:
            return checked_inputs(self.inputs, batch, length)
        return self.objective.inputs(self.objective.sequences * batch, length)

    def planned(
        self, limits: Limits, options: Mapping[str, Any], batch: int, seq: int, baselines: bool, with_frontier: bool
    ) -> PlanReport:
        """Predict a step within the limits, with a length that saves memory if this one does not, and its frontier if asked."""
        limit = limits.device if self.host_weights is None else None  # FSDP2's layers are compiled one by one, without a budget
        budget = {} if limit is None else {"memory_budget": max(limit - self.state, 1)}
        try:
            prediction = self.at(batch, seq, {**options, **budget}, baselines, with_frontier=with_frontier)
        except OverBudgetError as error:
            raise error if limits.device is None else self._refusal(error, limits.device, batch, seq) from None
        report = PlanReport(self.name, prediction, self.device, limits, ranks=self.ranks, updates=self.updates)
        is_compared = limits.device is None and CHECKPOINTING in prediction.baselines
        if not is_compared or why_nothing_streams(prediction.stages) is not None or _saves_memory(prediction):
            return report
        return replace(report, gains_from=self._gains_from(batch, seq, options))

    def _refusal(self, error: OverBudgetError, limit: int, batch: int, seq: int) -> OverBudgetError:
        """Return the error of the budget search for a device's whole memory, of which the optimizer's state takes a part."""
        terms = {name: size for name, size in {**error.terms, OPTIMIZER: self.state}.items() if size}
        largest = sorted(terms.items(), key=lambda item: -item[1])[:4]
        smallest = error.smallest + self.state
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in largest)
        refusal = OverBudgetError(
            f"a step of {batch:,} x {seq:,} tokens does not fit into {format_bytes(limit)}",
            found=f"the smallest possible peak is {format_bytes(smallest)} ({smallest} bytes): {parts}",
            do="give more memory, a shorter sequence, or a smaller model",
        )
        refusal.smallest, refusal.terms = smallest, terms
        return refusal

    def _gains_from(self, batch: int, seq: int, options: Mapping[str, Any]) -> int | None:
        """Return a length above `seq` with a memory gain, confirmed by a trace; None if there is none."""

        def saves_memory(length: int) -> bool:
            """Return whether a step of a length saves memory; false if it cannot be traced."""
            try:
                return _saves_memory(self.at(batch, length, options, baselines=True, chunked=False))
            except StreamFXError as error:  # custom inputs or position embeddings may not support this length
                log.info("it is unknown whether %d tokens save memory: %s", length, describe_error(error))
                return False

        return gains_from(saves_memory, seq, self.ranks.context)

    def lengths(self, limits: Limits, batch: int, first_length: int) -> dict[str, int]:
        """Return the longest length of each baseline, if it can be traced."""
        if not self._has_baselines:
            return {}
        inputs = self._inputs(batch, first_length)
        peak_at = self.baseline_peaks(batch, first_length)
        constant_bytes = self._constant_bytes(inputs)
        lengths = {
            name: find_longest(partial(peak_at, baseline), constant_bytes, known(limits.device), first_length, LENGTH_MULTIPLE)
            for name, baseline in baselines_of(self.model).items()
        }
        return {name: length for name, length in lengths.items() if length is not None}

    def baseline_peaks(self, batch: int, first_length: int) -> Callable[[Baseline, int], int | None]:
        """Return a function of a baseline and a length that returns the peak, or None if it cannot be traced.

        All its traces use the layer repetition at `first_length`.
        """
        repeat = self._layer_repetition(self._inputs(batch, first_length))

        def peak_at(baseline: Baseline, length: int) -> int | None:
            (model, wrapper), inputs = baseline, self._inputs(batch, length)
            with pretend_device(self.device.kind), pause_gc():
                cost = eager_cost(loss_of(model), inputs, wrapper, repeat)
            return None if cost is None else cost.peak + self._constant_bytes(inputs)

        return peak_at

    def _constant_bytes(self, inputs: Mapping[str, Tensor]) -> int:
        """Return the constant memory: parameters, buffers, optimizer state and inputs."""
        return weight_bytes(self.model) + self.state + sum(value.nbytes for value in set(inputs.values()))

    def _layer_repetition(self, inputs: Mapping[str, Tensor]) -> Repeat | None:
        """Return the layer repetition of the model, or None if there is none."""
        try:
            with pretend_device(self.device.kind), pause_gc():
                return find_layer_repetition(loss_of(self.model), inputs)
        except Exception:  # a baseline may be traceable even if the plain model is not
            return None

    def searched(
        self,
        limits: Limits,
        fixed_options: Mapping[str, Any],
        batch: int,
        seq: int,
        baselines: bool,
        max_batch: bool,
        allow_few_layers: bool,
    ) -> PlanReport:
        """Find the longest sequences of `batch`, or with `max_batch` the largest batch of `seq` tokens.

        With `allow_few_layers`, models of a few layers show the growth of the chunk work.
        """
        assert limits.device is not None
        sequences, layers = self.objective.sequences, len(layers_of(self.model))
        sought, first_size = SearchedSize(1, lambda size: sequences * size), batch
        if not max_batch:
            sought = SearchedSize(LENGTH_MULTIPLE * self.ranks.context, lambda _: sequences * batch)
            factor = 1 if fixed_options.get("offload", "none") == "none" else OFFLOAD_LENGTH_FACTOR
            first_size = max(seq, FIRST_LENGTH * self.ranks.context * factor)

        def at(size: int, options: Mapping[str, Any]) -> Prediction:
            return self.at(size, seq, options) if max_batch else self.at(batch, size, options)

        def growth_of_chunk_work(size: int, prediction: Prediction, other_size: int) -> Growth:
            """Return the growth of the chunk work to `other_size`, from a trace of a few layers."""
            with first_layers(self.model, FEW_LAYERS):
                options = with_least_memory(sought.sequences(other_size), layers + 1, fixed_options)
                return growth_of(size, prediction, other_size, at(other_size, options))

        work = growth_of_chunk_work if allow_few_layers and layers > 2 * FEW_LAYERS else None
        best = find_largest(at, limits, fixed_options, first_size, sought, layers + 1, work)
        if best is None:
            asked = f"no {'batch' if max_batch else 'length'} fits into {format_bytes(limits.device)}"
            raise OverBudgetError(asked, do="give more memory, or a smaller model")
        size, prediction = best
        length, largest_batch = (None, size) if max_batch else (size, None)
        baseline_lengths = self.lengths(limits, batch, first_size) if baselines and not max_batch else {}
        return PlanReport(
            self.name, prediction, self.device, limits, length, largest_batch, self.ranks, self.updates, lengths=baseline_lengths
        )


def _saves_memory(prediction: Prediction) -> bool:
    """Return whether checkpointing takes at least `MIN_GAIN` times the memory of the backend; false if it was not traced."""
    checkpointing = prediction.baselines.get(CHECKPOINTING)
    return checkpointing is not None and checkpointing.peak_bytes >= MIN_GAIN * prediction.peak_bytes
