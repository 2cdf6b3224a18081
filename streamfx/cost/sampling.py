"""Sampled runs of a loop, from which the cost of all its chunks is computed.

The bytes and FLOPs of a chunk follow from its sizes, which depend on its index. The indices form segments along which
every size is an affine function of the index. So the ends and the middle of a segment suffice: the FLOPs of the chunks
between lie on a parabola, and the peak is at one of the ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

from torch import Tensor

from streamfx.cost.categories import LoopTerms
from streamfx.cost.curve import Curve, LoopInterval, Point, shortened
from streamfx.cost.meter import Delta, Meter, layout_of
from streamfx.cost.work import Work
from streamfx.ir.program import (
    Buffer,
    BufferOutput,
    BufferPart,
    ChunkSlice,
    ConcatOutput,
    LoopSpec,
    Placement,
    Selector,
    ShiftedRows,
)
from streamfx.ir.span import Span
from streamfx.ir.structural_hash import structure
from streamfx.runtime.chunks import Chunks
from streamfx.runtime.loop import Env, Loop

Chunk = tuple[int, int]


@dataclass(frozen=True)
class LoopRun:
    """The cost of a loop: its memory, the work of all chunks, and its curve, all relative to the state before the loop."""

    rise: Delta
    work: Work
    curve: Curve = field(default_factory=Curve)


class SampledLoop(Loop):
    """A loop that runs only a few of its chunks, and reports the cost of all of them to the meter.

    A loop runs no chunk if it equals one in `known`, in its loop body, its rows per chunk, and the shapes of its arguments.
    After a call, `peak` has the live bytes at the peak of the loop, and `chunk_bytes` those of them that one chunk computes.
    """

    def __init__(self, spec: LoopSpec, meter: Meter, terms: LoopTerms, known: dict[Any, LoopRun]) -> None:
        """Wrap a loop; `known` caches costs by signature and argument shapes, `terms` has its categories."""
        super().__init__(spec)
        self.meter, self.terms, self.known = meter, terms, known
        self.work = Work()
        self.rows = self.num_chunks = self.length = 0
        self.peak = self.chunk_bytes = 0
        self._segments: list[range] = []
        self._costs: dict[int, Work] = {}
        self._sampled_indices: Iterator[int] = iter(())
        self._is_cached = False
        self._chunk_starts: list[tuple[int, int]] = []  # (chunk index, number of points recorded before the chunk)

    def chunks(self, length: int, env: Env) -> Sequence[Chunk]:
        """Return the (start, stop) rows of the chunks to run: none if the cost is cached, else a sample of each segment."""
        self.rows, self.length = self.rows_per_chunk(length, env), length
        all_chunks = Chunks(length, self.rows, self.spec.reverse)
        self.num_chunks = len(all_chunks)
        if self._is_cached:
            return []
        self._segments = segments_of(all_chunks, self._clipping_rows(env))
        sampled = [chunk_index for segment in self._segments for chunk_index in sample_of(segment)]
        self._sampled_indices = iter(sampled)
        return [all_chunks[chunk_index] for chunk_index in sampled]

    def runner(self, bounds: Sequence[Chunk]) -> Callable[..., Sequence[Any]]:
        """Return the function that runs the loop body on one chunk and counts its work."""
        return self._run_metered

    def forward(self, *arguments: Any) -> tuple[Any, ...]:
        """Run the sampled chunks, or none if the cost is cached; add the work and the curve of all chunks to the meter."""
        env: Env = {symbol.name: int(value) for symbol, value in zip(self.spec.symbols, arguments, strict=False)}
        rows = self.rows_per_chunk(self.size(self.spec.length, env), env)
        key = (signature_of(self.spec), rows, self.terms, tuple(map(layout_of, arguments)))
        self._is_cached, self._costs, self._chunk_starts = key in self.known, {}, []
        live_before = self.meter.live
        work_before, terms_before = self.meter.work, dict(self.meter.live_terms)
        with self.meter.separate_recorder() as recorder:
            if self._is_cached:
                self.meter.add_peak(self.known[key].rise)
                results = super().forward(*arguments)
            else:
                with self.meter.measure_delta() as rise:
                    results = super().forward(*arguments)
                curve = Curve() if recorder is None else self._curve_of_all(recorder.points, work_before, terms_before)
                self.known[key] = LoopRun(rise, self._work_of(range(self.num_chunks)), curve)
        run = self.known[key]
        if live_before + run.rise.peak > self.peak:
            self.peak, self.chunk_bytes = live_before + run.rise.peak, max(0, run.rise.terms.get(self.terms.chunk, 0))
        self.meter.work, self.work = work_before.plus(run.work), self.work.plus(run.work)
        if self.meter.recorder is not None:
            interval = LoopInterval(
                self.spec.name, work_before, self.meter.work, self.num_chunks, min(self.num_chunks, MAX_GROUPS)
            )
            self.meter.recorder.add(replace(run.curve.shifted(work_before, terms_before), loops=(interval,)))
            self.meter.recorder.record(self.meter.work, self.meter.live_terms)
        return results

    def _curve_of_all(self, points: Sequence[Point], begin: Work, terms_before: Mapping[str, int]) -> Curve:
        """Compute the curve of all chunks from the points of a few, relative to the memory and work before the loop."""
        minus_terms, minus_work = {name: -size for name, size in terms_before.items()}, Work().minus(begin)
        relative = [point.shifted(minus_work, minus_terms) for point in points]
        ends = [start for _, start in self._chunk_starts[1:]] + [len(relative)]
        sampled = [
            SampledChunk(chunk_index, self._costs[chunk_index], relative[start:stop])
            for (chunk_index, start), stop in zip(self._chunk_starts, ends, strict=True)
        ]
        return curve_of_chunks(relative[: self._chunk_starts[0][1]], sampled, self.num_chunks, self._work_of)

    def _work_of(self, chunks: range) -> Work:
        """Return the work of the chunks with these consecutive indices."""
        overlaps = [(segment, range(max(segment[0], chunks[0]), min(segment[-1], chunks[-1]) + 1)) for segment in self._segments]
        kinds = [{chunk_index: cost[i] for chunk_index, cost in self._costs.items()} for i in range(len(Work._fields))]
        return Work(*(sum(total_over(overlap, segment, costs) for segment, overlap in overlaps if overlap) for costs in kinds))

    def _run_metered(self, *feeds: Any) -> Sequence[Any]:
        """Run the loop body on the next sampled chunk, and store its work by chunk index."""
        work_before = self.meter.work
        chunk_index = next(self._sampled_indices)
        if self.meter.recorder is not None:
            self._chunk_starts.append((chunk_index, len(self.meter.recorder.points)))
        with self.meter.named(self.terms.chunk):
            outputs: Sequence[Any] = self.spec.body(*feeds)
            self.meter.flush()
        self._costs[chunk_index] = self.meter.work.minus(work_before)
        return outputs

    # -- terms

    def _term(self, memory: Buffer | ConcatOutput) -> str:
        """Return the category of a buffer, or of a concatenated result."""
        concat_outputs = [output for output in self.spec.yields if isinstance(output, ConcatOutput)]
        terms = zip((*self.spec.buffers, *concat_outputs), (*self.terms.buffers, *self.terms.concatenated), strict=True)
        return next(term for candidate, term in terms if candidate is memory)

    def _adopt(self, output: ConcatOutput, result: Tensor) -> Tensor:
        """Return a result of the loop body without a copy, with its memory counted under the category of `output`."""
        self.meter.rename(result, self._term(output))
        return result

    def _result(self, output: ConcatOutput, tensors: Sequence[Any], env: Env) -> Tensor:
        """Return the tensor for a result. Memory that it reuses counts under the result's category from now on."""
        result = super()._result(output, tensors, env)
        if output.reuse is not None:
            self.meter.rename(result, self._term(output))
        return result

    def _new_buffer(self, memory: Buffer | ConcatOutput, env: Env, zeroed: bool) -> Tensor:
        """Allocate a buffer or a result under its category."""
        with self.meter.named(self._term(memory)):
            return super()._new_buffer(memory, env, zeroed)

    def _finish_buffer(self, output: BufferOutput, buffers: Sequence[Tensor], env: Env) -> Tensor:
        """Return the result of a buffer, with copies counted under the buffer's category."""
        with self.meter.named(self.terms.buffers[output.buffer]):
            return super()._finish_buffer(output, buffers, env)

    def _clipping_rows(self, env: Env) -> set[int]:
        """Return the chunk bounds at which the slice of any operand starts or stops being clipped."""
        rows: set[int] = set()
        for feed in self.spec.feeds:
            if isinstance(feed, (ChunkSlice, BufferPart)):
                for placement, selector in feed.selections:
                    rows |= self._clipping_rows_of_slice(placement, selector, env)
        return rows

    def _clipping_rows_of_slice(self, placement: Placement, selector: Selector, env: Env) -> set[int]:
        """Return the chunk bounds at which one operand's slice starts or stops being clipped.

        A chunk [s, e) reads rows [s + low, e + high), so an axis that ends at row r clips it from r - low or r - high on.
        """
        start = self.size(placement.rows.offset, env)
        ends = {start, start + self.size(placement.rows.length, env)}
        shifts = {0}
        if isinstance(selector, Span):
            shifts = {bound for bound in (selector.low, selector.high) if bound is not None}
        elif isinstance(selector, ShiftedRows):
            shifted_start = self.size(selector.rows.offset, env)
            ends |= {shifted_start, shifted_start + self.size(selector.rows.length, env)}
            window_shift = self.size(selector.by, env)
            shifts = {0, window_shift, window_shift + selector.reach}
        return {end - shift for end in ends for shift in shifts}


def segments_of(chunks: Chunks, clipping_rows: Iterable[int]) -> list[range]:
    """Divide the chunk indices into segments along which sizes change linearly.

    The first chunk, the last chunk, and each chunk that contains or touches a clipping row are segments by themselves.
    """
    single_chunks = {0, len(chunks) - 1}.union(*map(chunks.touching, clipping_rows))
    segments: list[range] = []
    start = 0
    for chunk_index in sorted(single_chunks):
        if start < chunk_index:
            segments.append(range(start, chunk_index))
        segments.append(range(chunk_index, chunk_index + 1))
        start = chunk_index + 1
    return segments


def sample_of(segment: range) -> list[int]:
    """Return the ends and the middle of a segment."""
    return sorted({segment[0], segment[len(segment) // 2], segment[-1]})


def total_over(part: range, segment: range, costs: dict[int, int]) -> int:
    """Return the cost of a part of `segment`: the sum over `part` of the parabola through the sampled costs."""
    points = [(chunk_index, costs[chunk_index]) for chunk_index in sample_of(segment)]
    constant, linear, quadratic = _parabola(points)
    first, count = part[0], len(part)
    last = first + count - 1
    indices = count * (first + last) // 2
    squares = _squares_up_to(last) - _squares_up_to(first - 1)
    return int(constant * count + linear * indices + quadratic * squares)


def _squares_up_to(last: int) -> int:
    """Return the sum of the squares of 0 to `last`."""
    return last * (last + 1) * (2 * last + 1) // 6


def _parabola(points: Sequence[tuple[int, int]]) -> tuple[Fraction, Fraction, Fraction]:
    """Return the constant, linear and quadratic coefficient of the polynomial through up to three points (Newton's form)."""
    (x, y), *other_points = points
    if not other_points:
        return Fraction(y), Fraction(0), Fraction(0)
    slopes = [Fraction(other_y - y, other_x - x) for other_x, other_y in other_points]
    curve = (slopes[1] - slopes[0]) / (other_points[1][0] - other_points[0][0]) if len(other_points) == 2 else Fraction(0)
    second_x = other_points[0][0]
    return y - slopes[0] * x + curve * x * second_x, slopes[0] - curve * (x + second_x), curve


def signature_of(spec: LoopSpec) -> tuple[Any, ...]:
    """Return the properties of a loop that determine its cost, besides its rows per chunk: equal layers have equal signatures."""
    buffers = tuple(replace(buffer, name="") for buffer in spec.buffers)
    sizes = (spec.length, spec.reverse, spec.symbols)
    return structure(spec.body.graph), spec.feeds, spec.sources, buffers, spec.yields, sizes


# -- the curve of all chunks
#
# Chunks are divided into at most `MAX_GROUPS` groups of neighbors. Each group is represented by one chunk that ran, stretched
# over the work of the group.

MAX_GROUPS = 16
POINTS_PER_GROUP = 12


@dataclass(frozen=True)
class SampledChunk:
    """A chunk that ran: its index, its work, and its points relative to the start of the loop."""

    chunk_index: int
    work: Work
    points: Sequence[Point]

    @property
    def peak(self) -> int:
        """The peak of the chunk above the start of the loop."""
        return max((point.total for point in self.points), default=0)


def curve_of_chunks(
    points_before: Sequence[Point], sampled: Sequence[SampledChunk], num_chunks: int, work_of: Callable[[range], Work]
) -> Curve:
    """Return the curve of a loop with `num_chunks` chunks, from the points of the sampled ones.

    `points_before` was recorded before the chunks; `work_of` returns the work of a range of chunks.
    """
    points, work_done = list(points_before), Work()
    for group in chunk_groups(num_chunks):
        chunk, work = _representative(group, sampled), work_of(group)
        points += _rescaled(chunk, work, work_done)
        work_done = work_done.plus(work)
    return Curve(tuple(points), (), work_done)


def chunk_groups(num_chunks: int) -> list[range]:
    """Return chunk indices in groups of about equal size; the first and the last chunk are separate."""
    if num_chunks <= MAX_GROUPS:
        return [range(chunk_index, chunk_index + 1) for chunk_index in range(num_chunks)]
    inner_chunks, inner_groups = num_chunks - 2, MAX_GROUPS - 2
    bounds = [1 + inner_chunks * group // inner_groups for group in range(inner_groups + 1)]
    return [range(1), *(range(*pair) for pair in pairwise(bounds)), range(num_chunks - 1, num_chunks)]


def _representative(group: range, sampled: Sequence[SampledChunk]) -> SampledChunk:
    """Return the sampled chunk that represents a group: in the group, the chunk with the highest peak, or else the nearest."""
    in_group = [chunk for chunk in sampled if chunk.chunk_index in group]
    if in_group:
        return max(in_group, key=lambda chunk: chunk.peak)
    middle = group[len(group) // 2]
    return min(sampled, key=lambda chunk: abs(chunk.chunk_index - middle))


def _rescaled(chunk: SampledChunk, work: Work, work_done: Work) -> Iterator[Point]:
    """Yield the points of a chunk, stretched over the work of its group: counters grow in proportion, bytes stay.

    Points after the chunk's own work (those of the last chunk run to the end of the loop) move to the end of the group.
    """
    begin = chunk.points[0].work if chunk.points else Work()
    for point in shortened(chunk.points, POINTS_PER_GROUP):
        counters = zip(point.work.minus(begin), chunk.work, work, strict=True)
        shares = (total * min(at_point, of_chunk) // of_chunk if of_chunk else 0 for at_point, of_chunk, total in counters)
        yield Point(work_done.plus(Work(*shares)), point.terms)
