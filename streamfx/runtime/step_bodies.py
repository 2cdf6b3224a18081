"""The code of loop bodies in one step: eager, or compiled by a snapshot of what another process has compiled so far.

A *step* is a run of a forward graph and of its backward graph. Its code is fixed when the forward graph begins, and the values
that it saves bring it to the backward graph, so both halves use the same code.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from streamfx.runtime.shape_families import FamilyCode, Numbers

if TYPE_CHECKING:
    from streamfx.runtime.background_bodies import BackgroundBodies
    from streamfx.runtime.compiled_segments import Segment

STEP_ATTRIBUTE = "_streamfx_step_bodies"  # attribute of a value saved by a forward graph: the `StepBodies` of its step
Codes = Mapping[Hashable, Sequence[FamilyCode]]  # keyed by the structure of a segment and the kinds of its inputs


@dataclass(frozen=True)
class Snapshot:
    """The compiled code that a step may use; number 0 has none, and bodies run eagerly."""

    number: int = 0
    codes: Codes = field(default_factory=dict)


class StepBodies:
    """The code of the loop bodies of a program in one step, and which layouts of inputs occurred that have no code."""

    def __init__(self, program: BackgroundBodies, snapshot: Snapshot, number: int) -> None:
        """Begin a step: the `number`-th of the program, with the code of a snapshot."""
        self.program, self.snapshot, self.number = program, snapshot, number
        self._noted: set[Hashable] = set()  # (identifier of the segment, layout of its inputs)

    @property
    def is_eager(self) -> bool:
        return not self.snapshot.codes

    def note_inputs(self, segment: Segment, inputs: Sequence[Any]) -> None:
        """Note the inputs of a segment that runs eagerly: numbers, and (shape, strides, dtype, device) of tensors."""
        key = id(segment), tuple(inputs)
        if key not in self._noted:
            self._noted.add(key)
            self.program.note_inputs(segment, inputs, self.number)

    def note_layout(self, segment: Segment, kinds: Hashable, numbers: Numbers) -> bool:
        """Note the layout of a segment without code; return whether another step may have code for it."""
        key = id(segment), kinds, numbers
        if key not in self._noted:
            self._noted.add(key)
            self.program.note_layout(segment, kinds, numbers, self.number)
        return self.program.may_get_code(segment, kinds)


_step: ContextVar[StepBodies | None] = ContextVar("streamfx_step_bodies", default=None)


def current_step() -> StepBodies | None:
    """Return the step that runs here; None if segments compile on their first call."""
    return _step.get()


@contextmanager
def use_step(step: StepBodies | None) -> Iterator[StepBodies | None]:
    """Context manager for the run of a forward or backward graph: inside it, loop bodies run with the code of `step`."""
    token = _step.set(step)
    try:
        yield step
    finally:
        _step.reset(token)


def step_of(arguments: Sequence[Any]) -> StepBodies | None:
    """Return the step that a forward graph attached to an input of its backward graph; None if saved tensor hooks removed it."""
    steps = (getattr(argument, STEP_ATTRIBUTE, None) for argument in arguments if isinstance(argument, Tensor))
    return next((step for step in steps if step is not None), None)


def program_of(module: nn.Module) -> BackgroundBodies | None:
    """Return the program to which the loops of a host program belong, if another process compiles its bodies."""
    bodies = (getattr(loop, "compiled", None) for loop in module.modules())
    return next((body.background for body in bodies if body is not None), None)
