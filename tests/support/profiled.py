"""What a call runs, as the profiler records it: without the trees that torch makes of records, which take longer than a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def records_of(call: Callable[[], Any], **options: Any) -> list[Any]:
    """The profiler's records, in the order in which they begin."""
    with profile(activities=[ProfilerActivity.CPU], **options) as seen:
        call()
    found: Any = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
    return sorted(found, key=lambda record: record.start_ns())


def names_of(call: Callable[[], Any]) -> list[str]:
    """Operators, collectives and notes, in the order in which they begin."""
    return [record.name() for record in records_of(call)]
