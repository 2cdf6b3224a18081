"""A subgraph of a loop body, compiled by Inductor once for all bodies with an equal subgraph and for chunks of all lengths.

A loop runs its body once per chunk of the sequence, and the last chunk may be shorter. A family (`shape_families.py`) is a set of
input sizes and strides, all of the form slope * n + offset; a version is compiled code for one family. `numbers` are the sizes
and strides of all inputs in one tuple; `kinds` are their dtypes, devices and ranks, which a version fixes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from streamfx.ir.structural_hash import structure
from streamfx.log import log
from streamfx.progress import Tally
from streamfx.runtime.inductor_errors import blame
from streamfx.runtime.shape_families import (
    Family,
    FamilyCode,
    Numbers,
    any_size,
    family_of,
    find_code,
    graph_for,
    layout_of,
    shapes_for,
    single_member,
    widened_family,
    with_contiguous_rows,
)
from streamfx.runtime.step_bodies import StepBodies, current_step
from streamfx.torch_private.dynamo import compiling
from streamfx.torch_private.inductor import InductorMemoryError, compile_for_one_size, compile_for_sizes

MAX_CACHED_LAYOUTS = 32  # per subgraph: layouts with a cached callable; beyond that, the cache is cleared
MAX_VERSIONS = 6  # per subgraph: further shapes run eagerly
FIRST_PAUSE_CALLS = 32
NOT_COMPILED = "a part of a loop body runs uncompiled: %s. The result is exact, but the step is slower."
NO_MEMORY = (
    "memory ran out while a part of a loop body was compiled (%s). It runs eagerly until another attempt succeeds: "
    "the result is exact, but the step is slower. A smaller memory_budget or chunk_size leaves more memory free."
)


@dataclass
class CompilePause:
    """Counts the calls that run eagerly after a compilation has run out of memory. Each pause is twice as long as the last one.

    Another attempt may succeed, because memory may be free in another layer or step. But an attempt takes seconds, so
    there are few: ten in the first 32,000 calls.
    """

    length: int = FIRST_PAUSE_CALLS
    remaining: int = 0

    def begin(self) -> None:
        """Begin a pause, and double the length of the next one."""
        self.remaining, self.length = self.length, 2 * self.length

    def skips_call(self) -> bool:
        """Count a call; return whether it is part of the pause, so that nothing is compiled."""
        self.remaining -= self.remaining > 0
        return self.remaining > 0


_versions: dict[Hashable, list[FamilyCode]] = {}  # keyed by the subgraph's structure and the kinds of its inputs


class Segment:
    """A subgraph of a loop body, compiled on its first calls.

    If the loop has chunks of several lengths, the first calls run eagerly until two lengths are known, and then one
    version is compiled for all lengths. Otherwise a version is compiled for the first length, and one for all lengths
    after a call with another length.

    The shapes and strides of the inputs determine the version. The choice is made once per layout and cached.

    In a step whose code another process compiles (`step_bodies.py`), the segment compiles nothing: it runs the step's version for
    the inputs, or runs eagerly.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        """Wrap a subgraph of a loop body."""
        self.module = module
        self.structure = structure(module.graph)  # equal for equal subgraphs, which share compiled versions
        self.tally: Tally | None = None  # of all segments of the same program
        self._first_numbers: dict[Hashable, Numbers] = {}  # of the first call, by kinds
        self._code_by_layout: dict[Hashable, Callable[..., Sequence[Any]]] = {}  # keyed by shapes, strides and dtypes of inputs
        self._pause = CompilePause()

    def __call__(self, *inputs: Any, has_several_lengths: bool = False) -> Sequence[Any]:
        """Return the subgraph's results, by the version for inputs of these shapes, strides and dtypes.

        `has_several_lengths`: the loop has chunks of several lengths.
        """
        layout = tuple([(value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else value for value in inputs])
        step = current_step()
        if step is not None:
            run = self._code_by_layout.get((step.snapshot.number, layout)) or self._find_code_of_step(step, inputs, layout)
            return run(*inputs)
        run = self._code_by_layout.get(layout) or self._select_code(inputs, layout, has_several_lengths)
        return run(*inputs)

    def _find_code_of_step(self, step: StepBodies, arguments: Sequence[Any], layout: Hashable) -> Callable[..., Sequence[Any]]:
        """Return the version of a step for inputs with this layout, or the eager subgraph, after which a version may follow.

        The choice is cached, except while a version may follow.
        """
        kinds, numbers = layout_of([with_contiguous_rows(value) for value in arguments])
        code = find_code(step.snapshot.codes.get((self.structure, kinds), ()), numbers)
        if code is None and step.note_layout(self, kinds, numbers):
            return self._run_eagerly
        return self._cache(self._run_eagerly if code is None else code.bound(numbers, arguments), (step.snapshot.number, layout))

    def _cache(self, run: Callable[..., Sequence[Any]], key: Hashable) -> Callable[..., Sequence[Any]]:
        """Cache a callable for a layout, and return it."""
        if len(self._code_by_layout) >= MAX_CACHED_LAYOUTS:
            self._code_by_layout.clear()
        self._code_by_layout[key] = run
        return run

    def _select_code(self, arguments: Sequence[Any], layout: Hashable, has_several_lengths: bool) -> Callable[..., Sequence[Any]]:
        """Return the callable for inputs with this layout: an existing version, a new one, or the eager subgraph.

        The choice is cached, except while memory is short or a second chunk length is still unknown.
        """
        inputs = [with_contiguous_rows(value) for value in arguments]
        kinds, numbers = layout_of(inputs)
        codes = _versions.setdefault((self.structure, kinds), [])
        code = find_code(codes, numbers)
        if code is None and len(codes) < MAX_VERSIONS and not self._pause.skips_call():
            with compiling():
                code = find_code(codes, numbers) or self._compile_new(kinds, numbers, inputs, codes, has_several_lengths)
                codes += [code] if code is not None and code not in codes else []
        if code is None and len(codes) < MAX_VERSIONS:
            return self._run_eagerly  # not cached: a later call may find a compiled version
        return self._cache(self._run_eagerly if code is None else code.bound(numbers, arguments), layout)

    def _run_eagerly(self, *inputs: Any) -> Sequence[Any]:
        """Run the subgraph eagerly, on inputs with the strides that a compiled version would get."""
        return self.module.forward(*map(with_contiguous_rows, inputs))  # type: ignore[no-any-return]

    def _compile_new(
        self, kinds: Hashable, numbers: Numbers, inputs: Sequence[Any], codes: Sequence[FamilyCode], has_several_lengths: bool
    ) -> FamilyCode | None:
        """Compile a version for these numbers, and for others of their family, which two calls of different lengths determine.

        Return None if memory ran out, or, with `has_several_lengths`, if only one length is known. `codes`: the existing
        versions.
        """
        if has_several_lengths:
            first_numbers = self._first_numbers.setdefault(kinds, numbers)
            if first_numbers == numbers:
                return None
            return self._try_compile(family_of(first_numbers, numbers) or single_member(numbers), numbers, inputs)
        return self._try_compile(widened_family(codes, numbers), numbers, inputs)

    def _try_compile(self, family: Family, numbers: Numbers, inputs: Sequence[Any]) -> FamilyCode | None:
        """Return the version for a family that contains `numbers`; None if memory ran out, after which a pause begins."""
        with nullcontext() if self.tally is None else self.tally.next_activity():
            try:
                return compile_segment(self.module, family, numbers, inputs)
            except InductorMemoryError as error:
                self._pause.begin()
                warn_once(NO_MEMORY, str(error))
                return None


def compile_segment(module: fx.GraphModule, family: Family, numbers: Numbers, inputs: Sequence[Any]) -> FamilyCode:
    """Compile a subgraph for a family of sizes, or for the sizes of the family for which Inductor's guards hold.

    If Inductor cannot compile the subgraph, it runs eagerly.

    Raises:
        InductorMemoryError: memory ran out, even after the allocator returned its cached memory to the driver.
    """
    graph = graph_for(module, family, inputs)
    try:
        try:
            return _compile_family(graph, family, numbers, inputs)
        except InductorMemoryError:
            torch.cuda.empty_cache()  # kernels are loaded into the driver's memory, which the allocator's cache may occupy
            return _compile_family(graph, family, numbers, inputs)
    except InductorMemoryError:
        raise
    except Exception as error:
        warn_once(NOT_COMPILED, blame(error))
        return FamilyCode(family, graph, any_size)


def _compile_family(graph: fx.GraphModule, family: Family, numbers: Numbers, inputs: Sequence[Any]) -> FamilyCode:
    """Compile a function of n and of tensors (see `graph_for`) for one size, or for all n that Inductor's guards allow."""
    if family.at is None:
        return FamilyCode(family, compile_for_one_size(graph, [value for value in inputs if isinstance(value, Tensor)]), any_size)
    run, holds = compile_for_sizes(graph, numbers[family.at], lambda n: shapes_for(family, n, inputs))
    return FamilyCode(family, run, holds)


_warned: set[str] = set()


def warn_once(text: str, reason: str) -> None:
    """Log a warning, once for each text, inside an `except` block: a part of a loop body is not compiled."""
    if text not in _warned:
        _warned.add(text)
        log.warning(text, reason, exc_info=log.isEnabledFor(logging.DEBUG))
