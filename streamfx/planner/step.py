"""A training step of any size, on each of some ranks: planned at one size, or as large as fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from streamfx.budget import in_bytes
from streamfx.errors import OverBudget
from streamfx.inspection.tracing import layers_of
from streamfx.planner.collector import uncollected
from streamfx.planner.context import part_of_a_sequence
from streamfx.planner.devices import Device
from streamfx.planner.objectives import Objective
from streamfx.planner.predict import Prediction, predict
from streamfx.planner.report import PlanReport
from streamfx.planner.scout import Guess, first_layers, guessed
from streamfx.planner.search import AIM, FIRST_LENGTH, OFFLOADED, Limits, Sought, largest, least_memory
from streamfx.planner.shards import Sharding
from streamfx.runtime.device_kinds import supposed

LENGTHS = 256  # what the longest length of a rank is a multiple of
Inputs = Callable[[int, int], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Step:
    """A step of a model beside the state of an optimizer, which `updates` in the backward pass or behind it; `noted` is told each
    prediction.
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

    def at(self, batch: int, length: int, given: Mapping[str, Any], baselines: bool = False) -> Prediction:
        inputs = self._inputs(batch, length)
        with supposed(self.device.kind), uncollected(), self.ranks.divided(self.model) as model:
            found = predict(model, inputs, length, {**self.ranks.options, **given}, baselines, self.state, self.updates)
        if self.noted is not None:
            self.noted(found)
        return found

    def _inputs(self, batch: int, length: int) -> Mapping[str, Tensor]:
        """What a rank is given of a step of so many sequences."""
        if self.ranks.context > 1:
            return part_of_a_sequence(batch, length // self.ranks.context)
        if self.inputs is not None:
            return self.inputs(batch, length)
        return self.objective.inputs(self.objective.sequences * batch, length)

    def planned(self, limits: Limits, given: Mapping[str, Any], batch: int, seq: int, baselines: bool) -> PlanReport:
        within = {} if limits.device is None else {"memory_budget": max(limits.device - self.state, 1)}
        found = self.at(batch, seq, {**given, **within}, baselines)
        return PlanReport(self.name, found, self.device, limits, ranks=self.ranks, updates=self.updates)

    def searched(self, limits: Limits, given: Mapping[str, Any], batch: int, seq: int, max_batch: bool, few: bool) -> PlanReport:
        """The longest sequences, or the most of them; guessed by models of few layers where there may be such."""
        assert limits.device is not None
        sequences, layers = self.objective.sequences, len(layers_of(self.model))
        if max_batch:
            sought, first = Sought(1, lambda size: sequences * size), batch
        else:
            sought, first = Sought(LENGTHS * self.ranks.context, lambda _: sequences * batch), max(seq, self._first_length(given))

        def at(size: int, options: Mapping[str, Any]) -> Prediction:
            return self.at(size, seq, options) if max_batch else self.at(batch, size, options)

        def peak(count: int, size: int) -> int:
            with first_layers(self.model, count):
                return at(size, {**least_memory(sought.sequences(size), layers + 1, given), **given}).peak_bytes

        every = {**least_memory(1, layers + 1, given), **given}["keep_every"]
        guess = guessed(peak, layers, every, first, int(limits.device * AIM)) if few else None
        best = largest(at, limits, given, guess or Guess(first), sought, layers + 1)
        if best is None:
            what = "batch" if max_batch else "length"
            raise OverBudget(f"no {what} fits into {in_bytes(limits.device)}", do="give more memory, or a smaller model")
        size, found = best
        length, most = (None, size) if max_batch else (size, None)
        return PlanReport(self.name, found, self.device, limits, length, most, self.ranks, self.updates)

    def _first_length(self, given: Mapping[str, Any]) -> int:
        return FIRST_LENGTH * self.ranks.context * (OFFLOADED if given.get("offload") == "inputs" else 1)
