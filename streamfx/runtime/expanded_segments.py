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
`results` holds the gradients that it has completed, so that autograd can take ownership of them. `versions` are the version
counters of inputs when the run began: between segments the user's hooks run, and must not write to tensors that are still
needed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from streamfx.ir.release_plan import ReleaseSegment
from streamfx.runtime.expanded_code import CodeCall, CodeStep, FunctionText, dead_values, write_calls, write_drop, write_except

SegmentGenerator = Callable[[list[Any], dict[int, Any]], Generator[None, None, None]]
CHANGED = (
    "a tensor that is needed for computing gradients has been modified by an inplace operation while they were computed: {name} "
    "is at version {now}, {before} was expected. A hook on a parameter may write to that parameter only; if hooks write to other "
    "tensors, use gradients='at once'"
)


@dataclass(frozen=True)
class SegmentBoundary:
    """The start of a segment, which checks that `values` are unchanged, or its end, which releases `values` as results."""

    values: tuple[fx.Node, ...]
    defs: tuple[fx.Node, ...] = ()

    @property
    def uses(self) -> list[fx.Node]:
        return list(self.values)


def generate_segments(
    title: str, inputs: Sequence[fx.Node], segments: Sequence[tuple[ReleaseSegment, Sequence[CodeCall]]]
) -> SegmentGenerator:
    """Generate a generator function (arguments, results) that runs the segments of a graph, given the calls of each segment.

    It empties the list `arguments`, the values of `inputs`. It yields before the first segment and after each; a segment
    stores its gradients in the dictionary `results`, by index among the graph's results.
    """
    steps: list[list[CodeStep]] = [
        [SegmentBoundary(segment.reads), *calls, SegmentBoundary(tuple(segment.gradients.values()))]
        for segment, calls in segments
    ]
    text = FunctionText(
        node.name for node in (*inputs, *(node for segment_steps in steps for step in segment_steps for node in step.defs))
    )
    arguments, results, versions = map(text.unused, ("arguments", "results", "versions"))
    text.line(f"def {title}({arguments}, {results}):", 0)
    text.line("try:")
    text.line(f"[{', '.join(node.name for node in inputs)}] = {arguments}", 2)
    text.line(f"{arguments}.clear()", 2)
    all_reads = dict.fromkeys(node for segment, _ in segments for node in segment.reads)
    text.line(f"{versions} = {text.name('versions_of', versions_of)}({_by_name(all_reads)})", 2)
    text.line("yield", 2)
    dead_first, *dead_after = dead_values(inputs, [step for segment_steps in steps for step in segment_steps], ())
    write_drop(text, dead_first)
    for (segment, calls), (dead_at_begin, *dead_after_calls, dead_at_end) in zip(
        segments, _split(dead_after, map(len, steps)), strict=True
    ):
        text.line(f"{text.name('unchanged', check_unchanged)}({versions}, {_by_name(segment.reads)})", 2)
        write_drop(text, dead_at_begin)
        write_calls(text, calls, dead_after_calls)
        for index, node in segment.gradients.items():
            text.line(f"{results}[{index}] = {node.name}", 2)
        write_drop(text, dead_at_end)
        text.line("yield", 2)
    write_except(text)
    return text.function(title)


def _by_name(values: Iterable[fx.Node]) -> str:
    """Return keyword arguments that pass values by their names, as source: `weight=weight, x=x`."""
    return ", ".join(f"{node.name}={node.name}" for node in values)


def _split(elements: Sequence[Any], lengths: Iterable[int]) -> Iterator[Sequence[Any]]:
    """Yield consecutive slices of these lengths: ([a, b, c], [1, 2]) -> [a], [b, c]."""
    start = 0
    for length in lengths:
        yield elements[start : start + length]
        start += length


def versions_of(**values: Any) -> dict[str, int]:
    """Return, by name, the version counter of each value that is a tensor and has one."""
    return {name: value._version for name, value in values.items() if isinstance(value, Tensor) and not value.is_inference()}


def check_unchanged(versions: dict[str, int], **values: Any) -> None:
    """Raise an error if a tensor was modified in place since `versions_of` recorded its version, as autograd does."""
    for name, value in values.items():
        expected = versions.get(name)
        if expected is not None and value._version != expected:
            raise RuntimeError(CHANGED.format(name=name, now=value._version, before=expected))
