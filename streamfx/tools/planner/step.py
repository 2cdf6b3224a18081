"""A training step on each of several ranks: planned at one size, or at the largest size that fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from streamfx.budget import format_bytes, option_text
from streamfx.cost.categories import OPTIMIZER
from streamfx.cost.repeats import Repeat
from streamfx.errors import OverBudgetError, StreamFXError, describe_error
from streamfx.frontend.gc_pause import pause_gc
from streamfx.ir.facts import known
from streamfx.ir.stage_plan import MIN_ROWS
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
from streamfx.tools.planner.shards import ZERO2, ZERO3, Sharding
from streamfx.tools.report.verdict import CHECKPOINTING, CHUNKED, IN_CHUNKS, MIN_GAIN, NOTHING, why_nothing_streams

MORE = "give more memory, a shorter sequence, or a smaller model"
FEW_LAYERS = 4  # layers; with fewer, no stage has the same neighbors as the inner stages of the full model


@dataclass(frozen=True)
class TrainingStep:
    """A training step of a model whose `optimizer` has `state` bytes. With `updates`, the optimizer runs in the backward pass.

    `noted` is called with each prediction. `host_weights` are weights on the host, if they are planned there.
    """

    name: str
    model: nn.Module
    objective: Objective
    device: Device
    inputs: Inputs | None
    optimizer: str
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

    def least(self, batch: int, length: int, options: Mapping[str, Any], rows: int | None) -> Prediction:
        """Predict the step with the least memory, with chunks of so many rows, or of the usual number."""
        chunks = {} if rows is None else {"chunk_size": rows, "loss_chunk_size": rows}
        if self.ranks.context > 1:  # the budget search keeps all stage inputs if ranks exchange rows
            chunks = {"keep_every": 1, **chunks}
        sequences, stages = self.objective.sequences * batch, len(layers_of(self.model)) + 1
        return self.at(batch, length, with_least_memory(sequences, stages, {**chunks, **options}))

    @property
    def _bytes_at_end(self) -> int:
        """At least the bytes of parameters, gradients and optimizer state when backward ends."""
        gradients = 0 if self.updates else sum(weight.nbytes for weight in self.model.parameters() if weight.requires_grad)
        is_split = self.ranks.tensor > 1 or self.ranks.shard in (ZERO2, ZERO3)
        return self.state + (weight_bytes(self.model) + gradients) // (self.ranks.world if is_split else 1)

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
        budget = None if limit is None else max(limit - self.state, 1)
        at = partial(self.at, batch, seq, baselines=baselines, with_frontier=with_frontier)
        if limit is not None and self._bytes_at_end > limit:  # one trace is enough: a search would simulate all plans
            least = self.least(batch, seq, options, MIN_ROWS)
            if least.peak_bytes > limit:
                raise self._refusal(limits, (batch, seq), least.peak_bytes, least.peak_by_term, least)
        try:
            prediction = at({**options, **({} if budget is None else {"memory_budget": option_text(budget)})})
        except OverBudgetError as error:
            if budget is None or not error.smallest:
                raise
            if error.smallest > budget:
                raise self._refusal(limits, (batch, seq), error.smallest + self.state, error.terms) from None
            prediction = at({**options, "memory_budget": budget})  # the text is rounded down
        if not limits.hold(prediction):
            raise self._refusal(limits, (batch, seq), prediction.peak_bytes, prediction.peak_by_term, prediction)
        of_step = {"ranks": self.ranks, "updates": self.updates, "optimizer": self.optimizer}
        report = PlanReport(self.name, prediction, self.device, limits, **of_step)  # type: ignore[arg-type]
        is_compared = limits.device is None and CHECKPOINTING in prediction.baselines
        if not is_compared or why_nothing_streams(prediction.stages) is not None or _saves_memory(prediction):
            return report
        return replace(report, gains_from=self._gains_from(batch, seq, options))

    def _refusal(
        self, limits: Limits, size: tuple[int, int], peak: int, terms: Mapping[str, int], step: Prediction | None = None
    ) -> OverBudgetError:
        """Return the error for a batch and a length that do not fit into the limits. `step`: its prediction, if there is one.

        `peak` and `terms` are the bytes on the device. The terms of a budget search are without the optimizer's state.
        """
        terms = {**terms, OPTIMIZER: 0 if self.host_weights else self.state}
        size_text = f"{format_bytes(peak)} or more" if step is None else f"about {format_bytes(peak)}"
        where, found = limits.text, f"it takes {size_text}: {_largest(terms)}"
        if step is not None and (limits.device is None or peak <= limits.device):
            where = f"{format_bytes(known(limits.host))} of host memory per device"
            on_host = f": {_largest(step.host_weights.host)}" if step.host_weights else ""
            found = f"{format_bytes(step.host_bytes)} on the host{on_host}"
        if step is not None and (why := why_nothing_streams(step.stages)) is not None:
            found += f"; {NOTHING}, because {why}"
        asked = f"a step of {size[0]:,} x {size[1]:,} tokens does not fit into {where}"
        refusal = OverBudgetError(asked, found, do=MORE)
        refusal.smallest, refusal.terms = peak, {name: size for name, size in terms.items() if size}
        refusal.on_host = step.host_bytes if step else 0
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

        traced: list[Prediction] = []

        def at(size: int, options: Mapping[str, Any]) -> Prediction:
            return self.at(size, seq, options) if max_batch else self.at(batch, size, options)

        def recorded(size: int, options: Mapping[str, Any]) -> Prediction:
            traced.append(at(size, options))
            return traced[-1]

        def growth_of_chunk_work(size: int, prediction: Prediction, other_size: int) -> Growth:
            """Return the growth of the chunk work to `other_size`, from a trace of a few layers."""
            with first_layers(self.model, FEW_LAYERS):
                options = with_least_memory(sought.sequences(other_size), layers + 1, fixed_options)
                return growth_of(size, prediction, other_size, at(other_size, options))

        work = growth_of_chunk_work if allow_few_layers and layers > 2 * FEW_LAYERS else None
        best = find_largest(recorded, limits, fixed_options, first_size, sought, layers + 1, work)
        if best is None:
            least = min(traced, key=lambda one: one.peak_bytes)
            takes = f"a step of {least.batch:,} x {least.length:,} tokens takes {format_bytes(least.peak_bytes)}"
            asked = f"no {'batch' if max_batch else 'length'} fits into {limits.text}"
            raise OverBudgetError(asked, f"{takes}: {_largest(least.peak_by_term)}", do=MORE)
        size, prediction = best
        length, largest_batch = (None, size) if max_batch else (size, None)
        baseline_lengths = self.lengths(limits, batch, first_size) if baselines and not max_batch else {}
        return PlanReport(
            *(self.name, prediction, self.device, limits, length, largest_batch, self.ranks, self.updates),
            lengths=baseline_lengths,
            optimizer=self.optimizer,
        )


def _largest(terms: Mapping[str, int]) -> str:
    """List the four largest categories."""
    largest = sorted(terms.items(), key=lambda item: -item[1])[:4]
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in largest if size)


def _saves_memory(prediction: Prediction) -> bool:
    """Return whether checkpointing takes at least `MIN_GAIN` times the memory of the backend; false if it was not traced."""
    checkpointing = prediction.baselines.get(CHECKPOINTING)
    return checkpointing is not None and checkpointing.peak_bytes >= MIN_GAIN * prediction.peak_bytes
