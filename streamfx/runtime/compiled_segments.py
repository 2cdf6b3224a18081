"""A subgraph of a loop body, compiled by Inductor once for all bodies with an equal subgraph and for chunks of all lengths."""

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
    fitting,
    graph_for,
    layout_of,
    packed,
    shapes_for,
    single,
    wider,
)
from streamfx.torch_private.dynamo import compiling
from streamfx.torch_private.inductor import InductorMemoryError, compile_for_one_size, compile_for_sizes

MOST_READY = 32  # per subgraph: layouts with a cached callable; if lengths keep changing, the cache is cleared
MOST_FORMS = 6  # per subgraph: with more shapes than that it is not compiled again
FIRST_PAUSE = 32  # calls
NOT_COMPILED = "a part of a loop's body runs without a compiler: %s. The result is exact, the step is slower."
NO_MEMORY = (
    "memory ran out while a part of a loop's body was compiled (%s). It runs eagerly until another attempt succeeds: "
    "the result is exact, the step is slower. A smaller memory_budget or chunk_size leaves more memory free."
)


@dataclass
class CompilePause:
    """Calls that run eagerly after a compilation has run out of memory. Each pause is twice as long as the last one.

    Memory that is short now may be free in another layer or step, so there is always another attempt. An attempt
    takes seconds, so there are few of them: ten in the first 32,000 calls.
    """

    length: int = FIRST_PAUSE
    left: int = 0

    def begin(self) -> None:
        """Begin a pause, and double the length of the next one."""
        self.left, self.length = self.length, 2 * self.length

    def lasts(self) -> bool:
        """Count the current call, and return whether it is part of the pause."""
        self.left -= self.left > 0
        return self.left > 0


_forms: dict[Hashable, list[FamilyCode]] = {}


class Segment:
    """A subgraph of a loop body. `several`: the loop has chunks of more than one length.

    If `several`, the first calls are interpreted until two lengths are known, and then one version is compiled for
    all lengths. Otherwise a version is compiled for the first length, and one for all lengths once a call has another
    length.

    The shapes and strides of the inputs determine the version. The choice is made once per layout and cached in
    `_ready`.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        """Wrap a subgraph of a loop body; `_ready` maps layouts to code, `_first_numbers` the sizes of the first call."""
        self.module = module
        self.structure = structure(module.graph)
        self.tally: Tally | None = None  # of all segments of the same program
        self._first_numbers: dict[Hashable, Numbers] = {}
        self._ready: dict[Hashable, Callable[..., Sequence[Any]]] = {}
        self._pause = CompilePause()

    def __call__(self, *inputs: Any, several: bool = False) -> Sequence[Any]:
        """Run the code for inputs with this layout; `several`: the loop has chunks of more than one length."""
        layout = tuple([(value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else value for value in inputs])
        run = self._ready.get(layout) or self._select_code(inputs, layout, several)
        return run(*inputs)

    def _select_code(self, given: Sequence[Any], layout: Hashable, several: bool) -> Callable[..., Sequence[Any]]:
        """Return the callable for inputs with this layout."""
        inputs = [packed(value) for value in given]
        kinds, numbers = layout_of(inputs)
        codes = _forms.setdefault((self.structure, kinds), [])
        code = fitting(codes, numbers)
        if code is None and len(codes) < MOST_FORMS and not self._pause.lasts():
            with compiling():
                code = fitting(codes, numbers) or self._compile_new(kinds, numbers, inputs, codes, several)
                codes += [code] if code is not None and code not in codes else []
        if code is None and len(codes) < MOST_FORMS:
            return self._interpreted  # not cached: a later call may find a compiled version
        if len(self._ready) >= MOST_READY:
            self._ready.clear()
        run = self._ready[layout] = self._interpreted if code is None else code.bound(numbers, given)
        return run

    def _interpreted(self, *inputs: Any) -> Sequence[Any]:
        """Run the subgraph eagerly."""
        return self.module.forward(*map(packed, inputs))  # type: ignore[no-any-return]

    def _compile_new(
        self, kinds: Hashable, numbers: Numbers, inputs: Sequence[Any], codes: Sequence[FamilyCode], several: bool
    ) -> FamilyCode | None:
        """Return code for these sizes and their family; None if a second length is still unknown, or memory ran out."""
        if several:
            first_numbers = self._first_numbers.setdefault(kinds, numbers)
            if first_numbers == numbers:
                return None
            return self._compiled(family_of(first_numbers, numbers) or single(numbers), numbers, inputs)
        return self._compiled(wider(codes, numbers), numbers, inputs)

    def _compiled(self, family: Family, numbers: Numbers, inputs: Sequence[Any]) -> FamilyCode | None:
        """Return the compiled version for a family, or None if memory ran out."""
        with nullcontext() if self.tally is None else self.tally.next_activity():
            try:
                return compiled(self.module, family, numbers, inputs)
            except InductorMemoryError as error:
                self._pause.begin()
                tell(NO_MEMORY, str(error))
                return None


def compiled(module: fx.GraphModule, family: Family, numbers: Numbers, inputs: Sequence[Any]) -> FamilyCode:
    """Compile a subgraph for a family of sizes, or for those of the family for which Inductor's guards hold.

    If Inductor cannot compile the subgraph, it runs eagerly.

    Raises:
        InductorMemoryError: memory ran out, also after the allocator returned its cached memory to the driver.
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
        tell(NOT_COMPILED, blame(error))
        return FamilyCode(family, graph, any_size)


def _compile_family(graph: fx.GraphModule, family: Family, numbers: Numbers, inputs: Sequence[Any]) -> FamilyCode:
    """Compile a graph for one size, or for all sizes of a family that Inductor's guards allow."""
    if family.at is None:
        return FamilyCode(family, compile_for_one_size(graph, [value for value in inputs if isinstance(value, Tensor)]), any_size)
    run, holds = compile_for_sizes(graph, numbers[family.at], lambda n: shapes_for(family, n, inputs))
    return FamilyCode(family, run, holds)


_told: set[str] = set()


def tell(text: str, reason: str) -> None:
    """Warn, inside an `except` block, that a part of a loop body is not compiled: once for each text."""
    if text not in _told:
        _told.add(text)
        log.warning(text, reason, exc_info=log.isEnabledFor(logging.DEBUG))
