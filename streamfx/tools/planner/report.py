"""A plan as a dictionary and as a page of text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from streamfx.budget import format_bytes, option_text
from streamfx.cost.categories import OPTIMIZER
from streamfx.cost.comm import Traffic, total_traffic
from streamfx.cost.work import Work
from streamfx.tools.inspect.explain import OURS
from streamfx.tools.planner.devices import HOST_BANDWIDTH, REACHED, Device
from streamfx.tools.planner.host_report import host_lines, host_summary
from streamfx.tools.planner.overlap import NO_TRAFFIC, Seconds, devices_per_host, waiting_seconds
from streamfx.tools.planner.predict import Prediction, StepPrediction
from streamfx.tools.planner.recipe import recipe_of
from streamfx.tools.planner.search import Limits
from streamfx.tools.planner.shards import ALONE, ZERO1, Sharding
from streamfx.tools.report.diagram import Diagram, diagram_of
from streamfx.tools.report.exports import Exports
from streamfx.tools.report.page import Page, candidate_rows, frontier_cells, plan_page
from streamfx.tools.report.stage_titles import stage_rows
from streamfx.tools.report.text import in_flops, in_seconds, reason_lines, streams_of, suffix_of, table_lines
from streamfx.tools.report.timeline import Timeline, memory_timeline
from streamfx.tools.report.verdict import (
    EAGER,
    StepCost,
    length_verdict,
    times,
    verdict,
    verdict_within,
    why_nothing_streams,
)

RESERVE = 0.02  # fraction of a device's memory to leave free for allocations outside the plan
NOT_COUNTED = "the driver's context, buffers of collectives and libraries, and gaps between allocations"
KINDS = {"linear": "products", "attention": "attention"}
ASSUMED = "{rates}; element-wise work fused if compiled; 5 us of host time per kernel"
PUBLISHED_RATES, MEASURED_RATES = "60 % of published rates", "the shares of published rates measured on an H100"
ASSUMED_HERE = "rates of one product and one copy; element-wise work fused if compiled"
ASSUMED_WIRE = "60 % of published rates in one direction; rings; near within a machine of 8 devices, else far"
UNLIMITED = Limits()
COMPILED = "compiled_seconds"
TIMES = ("seconds", COMPILED)
LAYERS_TWICE = "gradient checkpointing, whole layers"


@dataclass(frozen=True)
class PlanReport(Exports):
    """The result of `streamfx.plan`: it prints as a page; `summary()` is a dictionary of plain values.

    `prediction` is for the requested length, or for the longest one that fits. `lengths` are the longest lengths of the
    baselines, 0 if not even the shortest fits. `gains_from` is a length with a memory gain if the requested one has
    none.

    Args:
        name: of the model.
        prediction: memory, operations and stages of a step, and its baselines.
        device: the device whose rates predict the times.
        limits: bytes of a device, and of its share of a host, that a step may use.
        max_length: the longest length that fits, if requested.
        max_batch: the largest batch that fits, if requested.
        ranks: how devices shard the model and the step.
        updates: whether an optimizer in the backward pass takes gradients.
        gains_from: a length from which memory is saved.
        lengths: the longest length of each baseline.
        optimizer: the name of the optimizer whose state is counted.

    Example:
        >>> import torch, streamfx
        >>> class Mean(torch.nn.Linear):
        ...     def forward(self, x): return torch.nn.functional.linear(x, self.weight).square().mean()
        >>> inputs = lambda batch, length: {"x": torch.empty(batch, length, 64, device="meta")}
        >>> report = streamfx.plan(Mean(64, 64, device="meta"), seq=1024, inputs=inputs)
        >>> report.max_length is None, report.prediction.batch
        (True, 1)
    """

    name: str
    prediction: Prediction
    device: Device
    limits: Limits = UNLIMITED
    max_length: int | None = None
    max_batch: int | None = None
    ranks: Sharding = ALONE
    updates: bool = False
    gains_from: int | None = None
    lengths: Mapping[str, int] = field(default_factory=dict)
    optimizer: str = "none"

    @property
    def verdict(self) -> str:
        """One sentence on whether the backend pays off."""
        step, limit = self.prediction, self.limits.device
        if self.max_length is not None:
            return length_verdict(self.max_length, self.lengths)
        others = [StepCost(name, way.peak_bytes, way.flops) for name, way in step.baselines.items()]
        others.sort(key=lambda other: other.way == EAGER)
        ours, why = StepCost("streambp", step.peak_bytes, step.flops), why_nothing_streams(step.stages)
        if limit is not None:
            return verdict_within(limit, self.limits.text, ours, others, why)
        return verdict(ours, others, why, self.gains_from)

    def summary(self) -> dict[str, Any]:
        """Return all figures as plain JSON types; bytes include parameters, inputs, gradients and the optimizer state.

        Returns:
            The report as a dictionary.

        Example:
            >>> import torch, streamfx
            >>> class Mean(torch.nn.Linear):
            ...     def forward(self, x): return torch.nn.functional.linear(x, self.weight).square().mean()
            >>> inputs = lambda batch, length: {"x": torch.empty(batch, length, 64, device="meta")}
            >>> summary = streamfx.plan(Mean(64, 64, device="meta"), seq=1024, memory="1GiB", inputs=inputs).summary()
            >>> summary["fits"], summary["length"], summary["memory"]
            (True, 1024, 1073741824)
        """
        prediction, twice = self.prediction, self.prediction.layers_twice
        return {
            "model": self.name,
            "length": prediction.length,
            "batch": prediction.batch,
            "memory": self.limits.device,
            "max_length": self.max_length,
            "max_batch": self.max_batch,
            "verdict": self.verdict,
            "gains_from": self.gains_from,
            "lengths": dict(self.lengths),
            "fits": None if self.limits == UNLIMITED else self.limits.hold(prediction),
            "peak_bytes": prediction.peak_bytes,
            "peak_by_term": dict(prediction.peak_by_term),
            "flops": prediction.flops,
            "baseline_flops": twice[0] if twice else None,
            "flops_by_kind": self._flops_by_kind(),
            "seconds": self._seconds(prediction.work) + sum(self._waited()) + self._step_seconds()[1],
            "optimizer_in_backward": self.updates,
            "world": self.ranks.world,
            "shard": self.ranks.shard,
            "tensor": self.ranks.tensor,
            "context": self.ranks.context,
            "host": self._host_copies(),
            "wire": self._sent_in_step(),
            "launches": prediction.work.launches,
            "bytes_of_products": prediction.work.product_bytes,
            "bytes_of_totals": prediction.work.total_bytes,
            "device": self.device.name,
            "ways": {name: self._baseline_summary(way) for name, way in prediction.baselines.items()},
            "choices": prediction.choices,
            "frontier": [
                {
                    "peak_bytes": plan.peak_bytes,
                    "seconds": self._seconds(plan.work),
                    "choice": plan.choice,
                    "rows": plan.rows,
                }
                for plan in prediction.frontier
            ],
            "recipe": recipe_of(prediction.explained["options"], self.ranks, prediction.host_weights is not None, self.optimizer),
            **{key: prediction.explained[key] for key in ("stages", "sequence", "options", "stopped", "not_checkpointed")},
        }

    @cached_property
    def timeline(self) -> Timeline:
        """Bytes alive over the step by category, next to the baselines. Its peak is `peak_bytes` of the summary."""
        courses = (
            memory_timeline(way, curve, self._seconds if way == OURS else self.device.seconds, flops)
            for way, (curve, flops) in self.prediction.curves.items()
        )
        waiting = "; without the time that a device waits for others" if self.prediction.explained["wire"] is not None else ""
        return Timeline(tuple(courses), f"predicted for {self.device.name}, {self._assumed_rates}{waiting}")

    @property
    def page(self) -> Page:
        """The content of the HTML report."""
        return plan_page(self.summary(), self.timeline, self._counted_text(), self._parallelism_text())

    @property
    def diagram(self) -> Diagram:
        """The stages, their loops, and the values passed between them."""
        return diagram_of(self.page.stages, self.prediction.flows)

    @property
    def _assumed_rates(self) -> str:
        if self.device.kind.type != "cuda":
            return ASSUMED_HERE
        return ASSUMED.format(rates=MEASURED_RATES if self.device.name in REACHED else PUBLISHED_RATES)

    def _host_copies(self) -> dict[str, Any] | None:
        """Return the bytes kept on the host and copied, or None if there are none. Times are None if the rate is unknown."""
        limit, device, devices = self.limits.host, self.device, devices_per_host(self.ranks.world)
        return host_summary(self.prediction, limit, device, devices, self._waited()[1], self._step_seconds())

    def _step_seconds(self) -> tuple[float, float]:
        """Return the seconds of the optimizer's step on the host, and those that the device waits for it; 0 without one there."""
        weights = self.prediction.host_weights
        return (
            (0.0, 0.0)
            if weights is None
            else weights.step_seconds(self.prediction.overlap_intervals, self._rates, HOST_BANDWIDTH)
        )

    @property
    def _rates(self) -> Seconds:
        """The times of loops, of communication and of copies on the device."""
        return Seconds(lambda interval: self._seconds(interval.work), self.device.sending, self.device.copying)

    def _sent_in_step(self) -> dict[str, Any] | None:
        """Return the data each device sends in a step, or None if it sends nothing."""
        wire = self.prediction.explained["wire"]
        if wire is None:
            return None
        near, far = self.device.near_and_far
        seconds = self.device.sending(Traffic(0, wire["bytes"], wire["far_bytes"]))
        return {**wire, "bytes_per_second": {"near": near, "far": far}, "seconds": seconds, "waited_seconds": self._waited()[0]}

    def _waited(self) -> tuple[float, float]:
        """Return the seconds a device waits for other ranks, and for host copies.

        With zero1, half of the bytes of an all-reduce are sent after the step: it is a reduce-scatter of gradients, then an
        all-gather of updated parameters.
        """
        overlap_intervals, device = self.prediction.overlap_intervals, self.device
        after_step = NO_TRAFFIC
        if self.ranks.shard == ZERO1:
            after_step = total_traffic(interval.reduced for interval in overlap_intervals).halved
            overlap_intervals = tuple(replace(interval, reduced=interval.reduced.halved) for interval in overlap_intervals)
        if (weights := self.prediction.host_weights) is not None:
            return 0.0, weights.waiting_seconds(overlap_intervals, self._rates)
        sent, copied = waiting_seconds(overlap_intervals, self._rates)
        return device.sending(after_step) + sent, copied

    def _counted_text(self) -> str:
        """Describe which values the memory figures include."""
        if self.prediction.host_weights is not None:
            return "with the weights and gradients that are on the device"
        state = "with optimizer state" if self.prediction.peak_by_term.get(OPTIMIZER) else "without optimizer state"
        gradients = "gradients until the optimizer takes them" if self.updates else "gradients"
        return f"with parameters and {gradients}, {state}"

    def _flops_by_kind(self) -> dict[str, dict[str, int]]:
        """Return the FLOPs of products and of attention, of the backend and each baseline."""
        prediction = self.prediction
        works = {"streambp": prediction.work, **{name: way.work for name, way in prediction.baselines.items()}}
        counts = {name: (work.flops, work.attention_flops) for name, work in works.items()}
        counts |= {LAYERS_TWICE: prediction.layers_twice} if prediction.layers_twice else {}
        return {name: {"linear": flops - attention, "attention": attention} for name, (flops, attention) in counts.items()}

    def _baseline_summary(self, way: StepPrediction) -> dict[str, Any]:
        """Return peak, FLOPs, launches and seconds of a baseline, also as compiled."""
        seconds = {name: self.device.seconds(work) for name, work in (("seconds", way.work), (COMPILED, way.work.compiled))}
        return {"peak_bytes": way.peak_bytes, "flops": way.flops, "launches": way.work.launches, **seconds}

    def _seconds(self, work: Work) -> float:
        """Return the seconds of the backend's work, with fused element-wise operators unless loop bodies run in eager mode."""
        return self.device.seconds(work if self.prediction.explained["options"].get("bodies") == "eager" else work.compiled)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    __repr__ = __str__

    def _lines(self) -> Iterator[str]:
        """Yield the page: verdict, memory, comparison, compute, communication, stages and choices."""
        summary, step = self.summary(), self.prediction
        memory = f", {self.limits.text} of memory" if self.limits.device is not None else ""
        yield f"{self.name}: {self.verdict}"
        yield f"  planned  a step of {step.batch} x {step.length:,} tokens{self._parallelism_text()}{memory}"
        if self.max_length is not None:
            yield f"  longest  {self.max_length:,} tokens fit"
            for way, length in self.lengths.items():
                yield f"{length:>19,}  {way}{f': ours is {times(self.max_length / length)} as long' if length else ''}"
        if self.max_batch is not None:
            yield f"  largest  a batch of {self.max_batch:,} fits"
        yield f"  memory   {format_bytes(step.peak_bytes)} at the peak, {self._counted_text()}:"
        for term, size in step.peak_by_term.items():
            yield f"             {format_bytes(size):>10}  {term}"
        yield from self._reserve_lines()
        yield from host_lines(summary["host"])
        yield ""
        header = ("", "peak", "compute", f"time on {self.device.name}, eager", "compiled by Inductor")
        column = TIMES[step.explained["options"].get("bodies") != "eager"]
        rows = [("streambp", {**{key: summary[key] for key in ("peak_bytes", "flops")}, column: summary["seconds"]})]
        rows += summary["ways"].items()
        cells = [
            (
                name,
                format_bytes(row["peak_bytes"]),
                in_flops(row["flops"]),
                *(in_seconds(row[key]) if key in row else "" for key in TIMES),
            )
            for name, row in rows
        ]
        yield from table_lines([header, *cells], left=1)
        if summary["not_checkpointed"]:
            yield f"  not compared with gradient checkpointing: {summary['not_checkpointed']}"
        if LAYERS_TWICE in (kinds := summary["flops_by_kind"]):
            ours, twice = kinds["streambp"], kinds[LAYERS_TWICE]
            parts = [f"{in_flops(ours[kind])} in {name} ({ratio(ours[kind], twice[kind])})" for kind, name in KINDS.items()]
            yield f"  compute  {', '.join(parts)} of a step that runs each layer's forward pass twice"
        yield f"  time     {self._assumed_rates}"
        yield from self._wire_lines(summary["wire"])
        yield ""
        yield f"  {streams_of(step.explained)}"
        stages = stage_rows(step.stages, 0, columns=("kind", "chunk_size", "saved_bytes"))
        cells = [(row.name + suffix_of(row.stage), str(row.stage["chunk_size"] or "-"), row.saved) for row in stages]
        yield from table_lines([("stage", "chunk", "saved"), *cells], left=1)
        yield from reason_lines(step.stages)
        if step.choices:
            yield ""
            yield from table_lines(list(candidate_rows(step.choices)), left=1)
        if summary["frontier"]:
            yield ""
            yield from table_lines(list(frontier_cells(summary)), left=1)
        yield ""
        yield from self._recipe_lines(summary["recipe"])
        if summary["stopped"]:
            yield ""
            yield f"the call could not be traced to its end: {summary['stopped']}"

    def _recipe_lines(self, recipe: dict[str, Any]) -> Iterator[str]:
        """Yield the code and the command that run this step."""
        yield f"  write    {recipe['enable']}"
        yield f"           or {recipe['compile']}"
        if "optimizer" in recipe:
            weights = self.prediction.host_weights
            state = format_bytes((weights.host if weights else self.prediction.peak_by_term).get(OPTIMIZER, 0))
            place = ", which is not part of memory_budget" if "memory_budget" in recipe["options"] else ""
            yield f"           {recipe['optimizer']}  # {state} of state{' on the host' if weights else place}"
        for key in ("shard", "launch"):
            if key in recipe:
                yield f"  {key:<8} {recipe[key]}"

    def _reserve_lines(self) -> Iterator[str]:
        """Yield the memory that is left for what a plan does not count, and the limit to plan with if that is too little."""
        limit = self.limits.device
        if limit is not None:
            spare, reserve = limit - self.prediction.peak_bytes, int(RESERVE * limit)
            yield f"  left     {format_bytes(spare)} for what is not counted: {NOT_COUNTED}"
            if spare < reserve:
                these, most = f"these may take {format_bytes(reserve)}", option_text(limit - reserve)
                yield f"           {these}: if the device has no more than {self.limits.text}, plan with --memory {most}"

    def _parallelism_text(self) -> str:
        """Describe how devices divide the step; empty for one device."""
        ranks = self.ranks
        if ranks.world == 1:
            return ""
        split = "" if ranks.tensor == 1 else f", layers split by {ranks.tensor}"
        if ranks.near == 1:
            return f" on each of {ranks.world} devices, {ranks.shard}"
        return f" on each {ranks.near} of {ranks.world} devices, {ranks.shard}{split}, sequences split by {ranks.context}"

    def _wire_lines(self, wire: dict[str, Any] | None) -> Iterator[str]:
        """Yield the bytes that each device sends, and the time it takes."""
        if wire is not None:
            sizes = {"near": wire["bytes"] - wire["far_bytes"], "far": wire["far_bytes"]}
            rates = {name: format_bytes(int(rate)) for name, rate in wire["bytes_per_second"].items()}
            parts = (f"{format_bytes(size)} {name}, at {rates[name]} per second" for name, size in sizes.items() if size)
            sent = " and ".join(parts)
            takes, waits = in_seconds(wire["seconds"]), in_seconds(wire["waited_seconds"])
            yield f"  wire     each device sends {sent}: {takes}, of which {waits} are waited for"
            yield f"           {ASSUMED_WIRE}"


def ratio(part: int, whole: int) -> str:
    return f"{part / whole:.3f}" if whole else "-"
