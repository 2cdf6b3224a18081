"""Generate Python source for a graph that runs in segments, with other code running between them.

    def backward(arguments, results):
        try:
            [weight, x, tangent] = arguments
            arguments.clear()
            versions = versions_of(weight=weight, x=x)
            yield
            unchanged(versions, x=x)
            mm = run_0(x, tangent)
            x = tangent = None
            results[0] = mm
            mm = None
            yield
            ...

The function is a generator, so each run owns the values that are alive between two segments. After a segment, only
`results` holds its results, so that autograd can take ownership of them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from streamfx.ir.release_plan import ReleaseSegment
from streamfx.runtime.expanded_code import CodeCall, CodeStep, Text, drop, dying, end, write

Stretches = Callable[[list[Any], dict[int, Any]], Generator[None, None, None]]
CHANGED = (
    "a tensor that is needed for computing gradients has been modified by an inplace operation while they were computed: {name} "
    "is at version {now}, {before} was expected. A hook on a parameter may write to that parameter alone; for others that write, "
    "ask for gradients='at once'"
)


@dataclass(frozen=True)
class Border:
    """The begin of a segment, which checks the `values` that it reads, or its end, which releases `values` as results."""

    values: tuple[fx.Node, ...]
    made: tuple[fx.Node, ...] = ()

    @property
    def used(self) -> list[fx.Node]:
        return list(self.values)


def stretches_of(
    title: str, given: Sequence[fx.Node], stretches: Sequence[tuple[ReleaseSegment, Sequence[CodeCall]]]
) -> Stretches:
    """Generate a generator function for the segments of a graph and the calls of each."""
    steps: list[list[CodeStep]] = [
        [Border(delivery.reads), *calls, Border(tuple(delivery.gradients.values()))] for delivery, calls in stretches
    ]
    text = Text(node.name for node in (*given, *(node for some in steps for step in some for node in step.made)))
    arguments, results, versions = map(text.unused, ("arguments", "results", "versions"))
    text.line(f"def {title}({arguments}, {results}):", 0)
    text.line("try:")
    text.line(f"[{', '.join(node.name for node in given)}] = {arguments}", 2)
    text.line(f"{arguments}.clear()", 2)
    watched = dict.fromkeys(node for delivery, _ in stretches for node in delivery.reads)
    text.line(f"{versions} = {text.name('versions_of', versions_of)}({_by_name(watched)})", 2)
    text.line("yield", 2)
    before, *after = dying(given, [step for some in steps for step in some], ())
    drop(text, before)
    at: dict[int, tuple[fx.Node, ...]] = {}
    for (delivery, calls), (first, *dead, last) in zip(stretches, _split(after, map(len, steps)), strict=True):
        text.line(f"{text.name('unchanged', unchanged)}({versions}, {_by_name(delivery.reads)})", 2)
        drop(text, first)
        for call, values in zip(calls, dead, strict=True):
            write(text, call)
            at[len(text.lines)] = call.stands_for
            drop(text, values)
        for position, node in delivery.gradients.items():
            text.line(f"{results}[{position}] = {node.name}", 2)
        drop(text, last)
        text.line("yield", 2)
    end(text, at)
    return text.function(title)


def _by_name(values: Iterable[fx.Node]) -> str:
    return ", ".join(f"{node.name}={node.name}" for node in values)


def _split(items: Sequence[Any], lengths: Iterable[int]) -> Iterator[Sequence[Any]]:
    begin = 0
    for length in lengths:
        yield items[begin : begin + length]
        begin += length


def versions_of(**values: Any) -> dict[str, int]:
    """Return the version counter of each tensor."""
    return {name: value._version for name, value in values.items() if isinstance(value, Tensor) and not value.is_inference()}


def unchanged(versions: dict[str, int], **values: Any) -> None:
    """Raise an error if a tensor was modified in place since its version was recorded."""
    for name, value in values.items():
        before = versions.get(name)
        if before is not None and value._version != before:
            raise RuntimeError(CHANGED.format(name=name, now=value._version, before=before))
