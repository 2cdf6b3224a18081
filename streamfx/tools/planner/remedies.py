"""The smallest change to a refused plan with which it fits, in words and as a command to run.

    options that were set     the planner chooses them
    an 8-bit optimizer
    offload                   stage inputs wait on the host
    quantized weights         if adapters are trained
    a shorter sequence        if at least half of it fits
    more devices              they shard all state (zero3)
    a shorter sequence        on these devices, if it has to be
    more memory               if nothing else fits

With more devices, the longest sequence that fits on the requested ones is a second command. Changes of the first four lines
may be combined. A change is traced only if the categories of the refused peak leave hope. The plan with the least memory is
traced, without the budget search: if that plan fits, the search finds it, or a faster one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import combinations, islice
from types import SimpleNamespace
from typing import Any, NamedTuple

from streamfx.budget import format_bytes, option_text
from streamfx.cost.categories import GRADIENTS, INPUTS, OPTIMIZER, PARAMETERS, STAGE_INPUTS
from streamfx.errors import OverBudgetError, StreamFXError
from streamfx.ir.facts import known
from streamfx.ir.stage_plan import MIN_ROWS
from streamfx.progress import show_activity
from streamfx.tools.planner.command import command_of
from streamfx.tools.planner.model_names import BACKEND_OPTIONS
from streamfx.tools.planner.overlap import devices_per_host
from streamfx.tools.planner.predict import Prediction
from streamfx.tools.planner.search import LENGTH_MULTIPLE, Limits
from streamfx.tools.planner.shards import DDP, ZERO1, ZERO3

WORDS = {"optimizer": "instead of adamw", "quantize": "weights"}
SHARDED = (PARAMETERS, GRADIENTS, OPTIMIZER)
EIGHT_BIT_SAVES, NF4_SAVES = 0.49, 0.74  # of the bytes of a 16-bit state and of 16-bit weights
TARGET = 0.98  # share of the memory that a shorter sequence is to take
MAX_WORLD, MAX_DOUBLINGS = 64, 7
UNLIMITED = 1 << 62  # bytes
MAX_ATTEMPTS, MAX_LENGTHS, MAX_WORLDS = 3, 4, 2  # traces of combined changes, of lengths, of numbers of devices
MULTIPLES, MIN_MULTIPLES = (1024, LENGTH_MULTIPLE), 16  # of tokens per device, in sequences of at least so many of them
MIN_SHARE = 2  # a sequence of at least one half is a smaller change than more devices

Request = SimpleNamespace
Change = tuple[Callable[[Request], Request], int]  # and the most bytes that it can save


@dataclass(frozen=True)
class Attempt:
    """A changed request with its smallest peak by category, and its bytes on the host; `step` is its prediction, if it fits."""

    request: Request
    peak: int
    terms: Mapping[str, int]
    step: Prediction | None = None
    host: int = 0

    def of(self, *terms: str) -> int:
        """Return the bytes of some categories."""
        return sum(self.terms.get(term, 0) for term in terms)


def advice(refusal: OverBudgetError, request: Request, planner: Planner, defaults: Mapping[str, Any]) -> str:
    """Return the smallest change to a refused request with which it fits, in words and as a command.

    `defaults` are the default arguments of `plan`. If no change is found, it is the remedy of the refusal.
    """
    request = _with(request, noted=None)
    with show_activity("looking for a change that fits"):
        fitting = RemedySearch(request, planner).find(refusal)
    return "\n".join(map(partial(_advice_for, request, defaults), fitting)) or refusal.do


def _advice_for(asked: Request, defaults: Mapping[str, Any], fitting: Attempt) -> str:
    """Return a line on an attempt that fits, with its changes and what it takes, and its command."""
    step, words = known(fitting.step), ", ".join(changes_in_words(asked, fitting.request))
    host = f", and {format_bytes(step.host_bytes)} on the host" if step.host_bytes else ""
    largest = f"up to {step.length:,} tokens" if asked.max_length else f"a batch of {step.batch:,}"
    size = largest if asked.max_length or asked.max_batch else f"it takes {format_bytes(step.peak_bytes)} or more"
    has_memory = (fitting.request.memory, fitting.request.host_memory) == (asked.memory, asked.host_memory)
    fits = "this fits" if has_memory else "no change was found that fits into this memory; with more of it, this fits"
    return f"{fits}: {words}; {size}{host}\n  {command_of(vars(fitting.request), defaults)}"


def changes_in_words(asked: Request, changed: Request) -> Iterator[str]:
    """Yield the differences of two requests in words, the size of the step and its devices first."""
    if changed.memory != asked.memory:
        yield f"{changed.memory} of memory"
    if changed.host_memory != asked.host_memory:
        yield f"{changed.host_memory} of host memory"
    has_other_devices = (changed.world, changed.shard) != (asked.world, asked.shard)
    if changed.seq != asked.seq:
        devices = "one device" if changed.world == 1 else f"{changed.world} devices"
        yield f"{changed.seq:,} tokens instead of {asked.seq:,}{'' if has_other_devices else f' on {devices}'}"
    if has_other_devices:
        instead = "" if changed.world == asked.world else f" instead of {asked.world}"
        yield f"{changed.world} devices{instead} that share parameters, gradients and optimizer state ({changed.shard})"
    for name, word in WORDS.items():
        if (value := getattr(changed, name)) != getattr(asked, name):
            yield f"{value} {word}"
    if changed.options.get("offload") != asked.options.get("offload"):
        yield "inputs of layers on the host"
    if names := [f"--{name.replace('_', '-')}" for name in asked.options.keys() - changed.options.keys()]:
        yield f"without {' and '.join(sorted(names))}"


class Planner(NamedTuple):
    """Functions of a request: its limits, its step, and its step with the least memory, for a number of rows per chunk."""

    limits: Callable[[Request], Limits]
    run: Callable[[Request], Prediction]
    predict_least: Callable[[Request, int | None], Prediction]


@dataclass(frozen=True)
class RemedySearch:
    """Searches for a change to `request` that fits into the limits."""

    request: Request
    planner: Planner
    attempts: list[Attempt] = field(default_factory=list)

    @cached_property
    def limit(self) -> int:
        """The bytes of a device."""
        limit = self.planner.limits(self.request).device
        return UNLIMITED if limit is None else limit

    def find(self, refusal: OverBudgetError) -> list[Attempt]:
        """Return the first change that fits. If it takes more devices, the longest sequence on the requested ones follows."""
        refused = Attempt(self.request, refusal.smallest, refusal.terms, host=refusal.on_host)
        if not refusal.terms:  # of a search: no size was planned
            refused = self._attempt(self.request) or refused
        changes = list(self._available(refused))
        lightest = refused
        for attempt in islice(self._softer(refused, changes), MAX_ATTEMPTS):
            if attempt.step is not None:
                return [attempt]
            lightest = min(lightest, attempt, key=self._excess)
        if (shorter := self._half_as_long(refused)) is not None:
            return [shorter]
        if changes and (changed := self._attempt(_changed(self.request, changes))) is not None:
            if changed.step is not None:
                return [changed]
            lightest = min(lightest, changed, key=self._excess)
        shorter, larger = self._shorter(lightest), None
        if shorter is None or MIN_SHARE * shorter.request.seq < self.request.seq:
            larger = self._more_devices(lightest)
        if shorter is None and larger is None:
            larger = self._shorter_on_more_devices(lightest) or self._with_more_memory(lightest)
        return [attempt for attempt in (larger, shorter) if attempt is not None]

    def _excess(self, attempt: Attempt) -> float:
        """Return the memory of an attempt in proportion to that of the device, or of the host if that is more."""
        return max(attempt.peak / self.limit, self._host_share(attempt))

    def _host_share(self, attempt: Attempt) -> float:
        """Return the memory of an attempt on the host in proportion to the limit there; 0 without a limit."""
        host = self.planner.limits(attempt.request).host
        return attempt.host / host if host else 0.0

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
        if self.request.max_length or (base.request.offload and self._host_share(base) > 1):  # weights take most of the host
            return None
        constant, longer = base.of(*SHARDED), Attempt(base.request, 0, {})
        for _ in range(MAX_LENGTHS):
            length = base.request.seq
            if longer.peak:
                slope = (longer.peak - base.peak) / (longer.request.seq - length)
                constant = base.peak - int(max(slope, 0) * length)
            multiple = self.request.context * next((one for one in MULTIPLES if length > MIN_MULTIPLES * one), 1)
            share = (TARGET * self.limit - constant) / max(base.peak - constant, 1)
            if host_share := self._host_share(base):
                share = min(share, TARGET / host_share)
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

    def _with_more_memory(self, base: Attempt) -> Attempt | None:
        """Return an attempt whose device, and host if it is limited, have the memory that it takes."""
        memory = {"memory": _rounded_up(base.peak)} if base.peak > self.limit else {}
        host = self.planner.limits(base.request).host
        if host is not None and base.host > host:
            memory["host_memory"] = _rounded_up(base.host * devices_per_host(base.request.world))
        attempt = self._attempt(_with(base.request, **memory))
        return None if attempt is None or attempt.step is None else attempt

    def _worlds(self, base: Attempt, room: int) -> Iterator[int]:
        """Yield numbers of devices, more than now or sharding more, each of which holds at most `room` bytes of state.

        None of them if the host's memory is the limit, because devices share it.
        """
        request = base.request
        if self._host_share(base) > 1:
            return
        sharded = {DDP: (), ZERO1: (OPTIMIZER,)}.get(request.shard, SHARDED)
        state = base.of(*SHARDED) + (request.world - 1) * base.of(*sharded)
        first = request.world if request.world > 1 and request.shard != ZERO3 else 2 * request.world
        yield from (world for i in range(MAX_DOUBLINGS) if (world := first << i) <= MAX_WORLD and state <= room * world)

    # -- attempts

    def _attempt(self, request: Request) -> Attempt | None:
        """Predict the least memory of a request, of its smallest size if it is a search; None if the request is invalid."""
        if (earlier := next((one for one in self.attempts if one.request == request), None)) is not None:
            return earlier
        sizes = {"seq": LENGTH_MULTIPLE * request.context} if request.max_length else {"batch": 1} if request.max_batch else {}
        limits = self.planner.limits(request)
        try:
            step = self.planner.predict_least(_with(request, **sizes), None if sizes else MIN_ROWS)
            fits = limits.hold(step) and request is not self.request
            found = step
            if sizes and fits:  # not each search reaches the smallest size
                found = self.planner.run(_with(request, baselines=False))
        except OverBudgetError:
            fits = False
        except StreamFXError:
            return None
        self.attempts.append(Attempt(request, step.peak_bytes, step.peak_by_term, found if fits else None, step.host_bytes))
        return self.attempts[-1]


def _rounded_up(size: int) -> str:
    """Return an amount of memory as an option takes it, rounded up to GiB, or to MiB or KiB if it is less."""
    unit = next((unit for unit in (1 << 30, 1 << 20) if size >= unit), 1 << 10)
    return option_text(-(-size // unit) * unit)


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
