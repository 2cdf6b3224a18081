"""The profiler's records of a call, without torch's trees of records, which take longer than a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.profiler import ProfilerActivity, profile


def records_of(call: Callable[[], Any], **options: Any) -> list[Any]:
    """The profiler's records, in the order in which they begin."""
    found: Any = _profiled(call, **options).events()
    return sorted(found, key=lambda record: record.start_ns())


def _profiled(call: Callable[[], Any], **options: Any) -> Any:
    with profile(activities=[ProfilerActivity.CPU], **options) as seen:
        call()
    return seen.profiler.kineto_results  # type: ignore[union-attr]


def names_of(call: Callable[[], Any]) -> list[str]:
    """Operators, collectives and notes, in the order in which they begin."""
    return [record.name() for record in records_of(call)]


def operators_of(call: Callable[[], Any]) -> list[tuple[str, Any]]:
    """Operators in the order in which they begin, each with the sizes of its first operand: a list of sizes if that is a list.

    Records of torch 2.11 have no sizes of lists, so they are taken from the tree.
    """
    results = _profiled(call, record_shapes=True)
    records = sorted(results.events(), key=lambda record: record.start_ns())
    if all(hasattr(record, "structured_input_shapes") for record in records):
        return [(record.name(), next(iter(record.structured_input_shapes()), None)) for record in records]
    events = sorted(_all_events(results.experimental_event_tree()), key=lambda event: event.start_time_ns)
    return [(event.name, _sizes_of_first(event)) for event in events]


def _all_events(roots: Iterable[Any]) -> Iterator[Any]:
    for event in roots:
        yield event
        yield from _all_events(event.children)


def _sizes_of_first(event: Any) -> Any:
    first = next(iter(getattr(event.extra_fields, "inputs", ())), None)
    return [item.sizes for item in first] if isinstance(first, list) else getattr(first, "sizes", None)


@dataclass(frozen=True)
class Allocations:
    """Bytes that were alive at the most, beyond those before, and those of the largest allocation."""

    peak: int
    largest: int

    @staticmethod
    def of(call: Callable[[], Any]) -> Allocations:
        sizes = [record.nbytes() for record in records_of(call, profile_memory=True) if record.name() == "[memory]"]
        alive = peak = 0
        for size in sizes:
            alive += size
            peak = max(peak, alive)
        return Allocations(peak, max(sizes, default=0))
