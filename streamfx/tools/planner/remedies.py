"""The smallest change to a refused plan with which it fits, as a command to run.

    options that were set     the planner chooses them
    an 8-bit optimizer
    offload                   stage inputs wait on the host
    quantized weights         if adapters are trained
    a shorter sequence        if at least half of it fits
    more devices              they shard all state (zero3)
    a shorter sequence        on these devices, if it has to be

Changes of the first four lines may be combined. A change is traced only if the categories of the refused peak leave hope. The
plan with the least memory is traced, without the budget search: if that plan fits, the search finds it, or a faster one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, islice
from types import SimpleNamespace
from typing import Any, NamedTuple

from streamfx.budget import format_bytes
from streamfx.cost.categories import GRADIENTS, INPUTS, OPTIMIZER, PARAMETERS, STAGE_INPUTS
from streamfx.errors import OverBudgetError, StreamFXError
from streamfx.ir.facts import known
from streamfx.ir.stage_plan import MIN_ROWS
from streamfx.progress import show_activity
from streamfx.tools.planner.command import command_of
from streamfx.tools.planner.model_names import BACKEND_OPTIONS
from streamfx.tools.planner.predict import Prediction
from streamfx.tools.planner.search import LENGTH_MULTIPLE, Limits
from streamfx.tools.planner.shards import DDP, ZERO1, ZERO3

SHARDED = (PARAMETERS, GRADIENTS, OPTIMIZER)
EIGHT_BIT_SAVES, NF4_SAVES = 0.49, 0.74  # of the bytes of a 16-bit state and of 16-bit weights
TARGET = 0.99  # share of the memory that a shorter sequence is to take
MAX_WORLD, MAX_DOUBLINGS = 64, 7
MAX_ATTEMPTS, MAX_LENGTHS, MAX_WORLDS = 3, 4, 2  # traces of combined changes, of lengths, of numbers of devices
MIN_SHARE = 2  # a sequence of at least one half is a smaller change than more devices

Request = SimpleNamespace
Change = tuple[Callable[[Request], Request], int]  # and the most bytes that it can save


@dataclass(frozen=True)
class Attempt:
    """A changed request with its smallest peak, by category; `step` is its prediction, if it fits."""

    request: Request
    peak: int
    terms: Mapping[str, int]
    step: Prediction | None = None

    def of(self, *terms: str) -> int:
        """Return the bytes of some categories."""
        return sum(self.terms.get(term, 0) for term in terms)


def with_remedy(refusal: OverBudgetError, request: Request, planner: Planner, defaults: Mapping[str, Any]) -> OverBudgetError:
    """Return the refusal of a request with the smallest change that fits into the limits as its remedy, if there is one.

    `defaults` are the default arguments of `plan`.
    """
    with show_activity("planning a change that fits"):
        found = RemedySearch(request, planner).find(refusal)
    if found is None or found.step is None:
        return refusal
    step = found.step
    on_host = f", {format_bytes(step.host_bytes)} on the host" if step.host_bytes else ""
    least = f"{step.batch:,} x {step.length:,} tokens take {format_bytes(step.peak_bytes)} or more{on_host}"
    do = f"run this, which fits ({least}): {command_of(vars(found.request), defaults)}"
    advised = OverBudgetError(refusal.asked, refusal.found, refusal.where, do)
    advised.smallest, advised.terms = refusal.smallest, refusal.terms
    return advised


class Planner(NamedTuple):
    """Functions of a request: its limits, its plan, and its plan with the least memory, for a number of rows per chunk."""

    limits: Callable[[Request], Limits]
    run: Callable[[Request], object]
    predict_least: Callable[[Request, int | None], Prediction]


@dataclass(frozen=True)
class RemedySearch:
    """Searches for a change to `request` that fits into the limits."""

    request: Request
    planner: Planner

    @cached_property
    def limit(self) -> int:
        """The bytes of a device."""
        return known(self.planner.limits(self.request).device)

    def find(self, refusal: OverBudgetError) -> Attempt | None:
        """Return the first change that fits."""
        refused = Attempt(self.request, refusal.smallest, refusal.terms)
        if not refusal.terms:  # of a search: no size was planned
            refused = self._attempt(self.request) or refused
        changes = list(self._available(refused))
        lightest = refused
        for attempt in islice(self._softer(refused, changes), MAX_ATTEMPTS):
            if attempt.step is not None:
                return attempt
            lightest = min(lightest, attempt, key=lambda one: one.peak)
        if (shorter := self._half_as_long(refused)) is not None:
            return shorter
        if changes and (changed := self._attempt(_changed(self.request, changes))) is not None:
            if changed.step is not None:
                return changed
            lightest = min(lightest, changed, key=lambda one: one.peak)
        changes_of_size = (self._half_as_long, self._more_devices, self._shorter, self._shorter_on_more_devices)
        return next(filter(None, (change(lightest) for change in changes_of_size)), None)

    # -- changes of options, optimizer and weights

    def _softer(self, refused: Attempt, changes: Sequence[Change]) -> Iterator[Attempt]:
        """Yield attempts with combinations of changes that may save enough, the fewest changes first."""
        for count in range(1, len(changes) + 1):
            for some in combinations(changes, count):
                may_fit = refused.peak - sum(saved for _, saved in some) <= self.limit
                if may_fit and (attempt := self._attempt(_changed(self.request, some))) is not None:
                    yield attempt

    def _available(self, refused: Attempt) -> Iterator[Change]:
        """Yield the changes that apply to the request, each with the most bytes that it can save."""
        request = self.request
        if request.options.keys() & set(BACKEND_OPTIONS) - {"offload"}:
            yield _with_planned_options, refused.peak - refused.of(PARAMETERS, OPTIMIZER, INPUTS)
        if request.optimizer == "adamw":
            yield lambda request: _with(request, optimizer="adamw8bit"), int(EIGHT_BIT_SAVES * refused.of(OPTIMIZER))
        if request.options.get("offload", "none") == "none":
            offload = {"offload": "inputs"}
            yield lambda request: _with(request, options={**request.options, **offload}), refused.of(STAGE_INPUTS)
        if request.lora_rank is not None and request.quantize is None:
            yield lambda request: _with(request, quantize="nf4"), int(NF4_SAVES * refused.of(PARAMETERS))

    # -- changes of the length and of the devices

    def _half_as_long(self, base: Attempt) -> Attempt | None:
        return self._shorter(base, self.request.seq // MIN_SHARE)

    def _shorter(self, base: Attempt, at_least: int = 2) -> Attempt | None:
        """Return an attempt with a shorter sequence, which the peaks at longer ones predict to fit; None if it is too short.

        All categories but the sharded ones are taken as proportional to the length, and after two attempts the whole peak as
        linear. Both are at most the true peak, so lengths approach the longest that fits from above.
        """
        if self.request.max_length:
            return None
        constant, longer = base.of(*SHARDED), Attempt(base.request, 0, {})
        for _ in range(MAX_LENGTHS):
            length = base.request.seq
            if longer.peak:
                slope = (longer.peak - base.peak) / (longer.request.seq - length)
                constant = base.peak - int(max(slope, 0) * length)
            multiple = self.request.context * (LENGTH_MULTIPLE if length > 2 * LENGTH_MULTIPLE * self.request.context else 1)
            share = (TARGET * self.limit - constant) / max(base.peak - constant, 1)
            shorter = min(int(share * length), length - 1) // multiple * multiple
            if shorter < max(at_least, multiple, 2):
                return None
            attempt = self._attempt(_with(base.request, seq=shorter))
            if attempt is None or attempt.step is not None:
                return attempt
            longer, base = base, attempt
        return None

    def _more_devices(self, base: Attempt) -> Attempt | None:
        """Return an attempt on the fewest devices that fit, which shard all state."""
        rest = base.peak - base.of(*SHARDED)
        for world in islice(self._worlds(base, self.limit - rest), MAX_WORLDS):
            attempt = self._attempt(_with(base.request, world=world, shard=ZERO3))
            if attempt is None or attempt.step is not None:
                return attempt
        return None

    def _shorter_on_more_devices(self, base: Attempt) -> Attempt | None:
        """Return an attempt with a shorter sequence, on devices half of whose memory holds the state, or on the most devices."""
        worlds = list(self._worlds(base, self.limit // 2))
        for world in dict.fromkeys((*worlds[:1], *worlds[-1:])):
            attempt = self._attempt(_with(base.request, world=world, shard=ZERO3))
            if attempt is not None and attempt.step is None:
                attempt = self._shorter(attempt)
            if attempt is not None:
                return attempt
        return None

    def _worlds(self, base: Attempt, room: int) -> Iterator[int]:
        """Yield numbers of devices, more than now or sharding more, each of which holds at most `room` bytes of state."""
        request = base.request
        sharded = {DDP: (), ZERO1: (OPTIMIZER,)}.get(request.shard, SHARDED)
        state = base.of(*SHARDED) + (request.world - 1) * base.of(*sharded)
        first = request.world if request.world > 1 and request.shard != ZERO3 else 2 * request.world
        yield from (world for i in range(MAX_DOUBLINGS) if (world := first << i) <= MAX_WORLD and state <= room * world)

    # -- attempts

    def _attempt(self, request: Request) -> Attempt | None:
        """Predict the least memory of a request, of its smallest size if it is a search.

        None if the request is invalid, or if its offloaded values do not fit on the host.
        """
        sizes = {"seq": LENGTH_MULTIPLE * request.context} if request.max_length else {"batch": 1} if request.max_batch else {}
        limits = self.planner.limits(request)
        try:
            step = self.planner.predict_least(_with(request, **sizes), None if sizes else MIN_ROWS)
            fits = limits.hold(step) and request is not self.request
            if sizes and fits:
                self.planner.run(_with(request, baselines=False))  # not each search reaches the smallest size
        except OverBudgetError:
            fits = False
        except StreamFXError:
            return None
        on_host = replace(limits, device=None)
        return Attempt(request, step.peak_bytes, step.peak_by_term, step if fits else None) if on_host.hold(step) else None


def _changed(request: Request, changes: Iterable[Change]) -> Request:
    for change, _ in changes:
        request = change(request)
    return request


def _with(request: Request, **changes: Any) -> Request:
    return SimpleNamespace(**{**vars(request), **changes})


def _with_planned_options(request: Request) -> Request:
    """Return the request without the options that the planner can choose."""
    options = {name: value for name, value in request.options.items() if name == "offload" or name not in BACKEND_OPTIONS}
    return _with(request, options=options)
