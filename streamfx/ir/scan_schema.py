"""Operators with a state, declared: which argument is the state before the first row, and which result is it after the last.

    scan(x, decay, first) -> y, last                                  rows of x, decay and y follow one another
    scan_backward(dy, dlast, x, decay, first) -> dx, ddecay, dfirst   from the last row to the first: dlast in, dfirst out

Of a call a `StatefulPlan` is made for each of the two, which says what a chunk of its rows is given, and what it leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from streamfx.ir.recurrence import RecurrenceAxes, axes_apart
from streamfx.ir.sizes import Size, product, shape_of, size_of
from streamfx.torch_private.symbolic_sizes import size_hint

ALIGNED = 16  # bytes: where a value of any type may begin


@dataclass(frozen=True)
class Stateful:
    """What is declared of an operator and of its backward, which graphs name so, and which take arguments of these names.

    `rows` names the arguments that have rows, with their dimension; `results` has that of each result, or None. `states` names
    the arguments that are states, each with the result that it is after the last row. Of the backward's arguments some are
    `cotangents` of results, some are `saved` results, by number; the others bear the names of the operator's own arguments. Its
    results are the `gradients` of these arguments. `always` are arguments that chunks are given whatever a call gives, `only`
    those that a call has to give, `counts` those that are the number of rows. Chunks begin at multiples of `block`, or of the
    argument that is called so.
    """

    name: str
    operators: tuple[str, str]
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    takes: tuple[str, ...]
    backward_takes: tuple[str, ...]
    rows: Mapping[str, int]
    results: tuple[int | None, ...]
    states: Mapping[str, int]
    cotangents: Mapping[str, int]
    gradients: tuple[str | None, ...]
    saved: Mapping[str, int] = field(default_factory=dict)
    always: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, Any] = field(default_factory=dict)
    counts: frozenset[str] = frozenset()
    block: int | str = 1

    @property
    def remade(self) -> dict[str, int]:
        """Saved results without rows: each chunk makes its own again."""
        return {name: number for name, number in self.saved.items() if self.results[number] is None}


class NotStatefulError(Exception):
    """Why what is declared does not hold for a call."""


@dataclass(frozen=True)
class StateSlot:
    """One state: the argument that it is given as, the result that it leaves as, and its place in the carry, in bytes."""

    argument: str
    result: int
    start: int
    stop: int | None
    shape: tuple[int, ...]  # one size may be known only when it runs: -1
    dtype: torch.dtype


@dataclass(frozen=True)
class StatefulResult:
    """A result that is used: the dimension of its rows; without one it is a sum over chunks, or what the last one leaves."""

    number: int
    rows: int | None
    dtype: torch.dtype


@dataclass(frozen=True)
class StatefulPlan:
    """A call of one of the two operators. `given` are the arguments that are no tensors, `operands` those that are, in order.

    Chunks are given what is `always` given; states that are `absent` begin with zeros. `orders` says how the dimensions of an
    operand follow one another in memory, outermost first. A backward is given the states with which a chunk began, and what the
    operator makes `again` of its rows, `remade`; of that `nothing` has no elements.
    """

    name: str
    function: Callable[..., Any]
    takes: frozenset[str]
    operands: tuple[str, ...]
    rows: Mapping[str, int]
    orders: Mapping[str, tuple[int, ...]]
    given: Mapping[str, Any]
    always: Mapping[str, Any]
    absent: frozenset[str]
    counts: frozenset[str]
    slots: tuple[StateSlot, ...]
    carried: Size
    results: tuple[StatefulResult, ...]
    axes: RecurrenceAxes
    block: int = 1
    again: StatefulPlan | None = None
    remade: Mapping[str, int] = field(default_factory=dict)
    nothing: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)


def forward_plan(declared: Stateful, arguments: Mapping[str, Any], wanted: Sequence[int]) -> tuple[StatefulPlan, list[Any]]:
    """`arguments` of a call by name, tensors by their values; of its results these are `wanted`. And its results."""
    for name, value in declared.only.items():
        if name in arguments and not _is_nothing_but(arguments[name], value):
            raise NotStatefulError(f"another {name} than {value}")
    always = {name: value for name, value in declared.always.items() if name in declared.takes}
    results = listed(declared.forward(**{**arguments, **always}))
    last = {name: _tensor(results[number], f"result {number}") for name, number in declared.states.items()}
    absent = _absent({name: (arguments.get(name), value) for name, value in last.items()})
    slots, carried = _slots([(name, declared.states[name], value) for name, value in last.items()])
    call = _StatefulCall(arguments, always, absent, declared.rows, results, declared.results, wanted)
    return call.plan(declared, slots, carried, None), results


def backward_plan(
    declared: Stateful, forward: StatefulPlan, arguments: Mapping[str, Any], known: Sequence[Any], wanted: Sequence[int]
) -> tuple[StatefulPlan, list[Any]]:
    """The same for the backward of a call whose results are known. `arguments` has the call's own, too, where what it saved is
    made again.
    """
    always = {name: value for name, value in declared.always.items() if name in declared.backward_takes}
    into = {number: name for name, number in declared.cotangents.items()}
    last = {name: known[number] for name, number in declared.states.items()}
    cotangents = {into[number]: known[number] for number in declared.states.values()}
    saved = {name: known[number] for name, number in declared.saved.items()}
    taken = {**saved, **arguments, **always, **last, **cotangents}
    results = listed(declared.backward(**{name: taken[name] for name in declared.backward_takes}))
    states = []
    for name, number in declared.states.items():
        place = declared.gradients.index(name)
        states.append((into[number], place, _tensor(results[place], f"result {place}")))
        if shape_of(states[-1][2]) != shape_of(last[name]):
            raise NotStatefulError(f"a gradient of {name} of another shape than {name}")
    absent = _absent({name: (arguments.get(name), value) for name, _, value in states})
    slots, carried = _slots(states)
    dims: dict[str, int | None] = {**declared.rows}
    dims |= {name: declared.results[number] for name, number in {**declared.cotangents, **declared.saved}.items()}
    made = [declared.rows.get(name) if name is not None else None for name in declared.gradients]
    call = _StatefulCall(arguments, always, absent, dims, results, made, wanted, known)
    return call.plan(declared, slots, carried, forward), results


@dataclass(frozen=True)
class _StatefulCall:
    """What is known of a call: its arguments, its results, and the dimensions of both that have rows."""

    arguments: Mapping[str, Any]
    always: Mapping[str, Any]
    absent: frozenset[str]
    dims: Mapping[str, int | None]
    results: Sequence[Any]
    made: Sequence[int | None]
    wanted: Sequence[int]
    known: Sequence[Any] = ()

    def plan(self, declared: Stateful, slots: tuple[StateSlot, ...], carried: Size, forward: StatefulPlan | None) -> StatefulPlan:
        tensors = {name: value for name, value in self.arguments.items() if isinstance(value, Tensor)}
        rows = {name: dim for name, value in tensors.items() if (dim := _dim(self.dims.get(name), value)) is not None}
        if not rows:
            raise NotStatefulError("no operand that has rows")
        parts = tuple(self._part(number) for number in self.wanted)
        made = {f"result {part.number}": (self.results[part.number], part.rows) for part in parts if part.rows is not None}
        _check_lengths({**{name: (tensors[name], dim) for name, dim in rows.items()}, **made}, self._counts(declared))
        is_forward = forward is None
        absent = self.absent if forward is None else self.absent | forward.absent
        remade = {} if is_forward else {name: (number, self.known[number]) for name, number in declared.remade.items()}
        return StatefulPlan(
            name=declared.name if is_forward else f"{declared.name}_backward",
            function=declared.forward if is_forward else declared.backward,
            takes=frozenset(declared.takes if is_forward else declared.backward_takes),
            operands=tuple(tensors),
            rows=rows,
            orders={name: _order(value) for name, value in tensors.items() if name not in absent},
            given={key: value for key, value in self.arguments.items() if key not in tensors and key not in declared.counts},
            always=self.always,
            absent=self.absent,
            counts=declared.counts,
            slots=slots,
            carried=carried,
            results=parts,
            axes=axes_apart(
                [(shape_of(value), rows.get(name)) for name, value in tensors.items()],
                [(shape_of(self.results[part.number]), part.rows) for part in parts],
            ),
            block=self._block(declared.block),
            again=forward,
            remade={name: number for name, (number, value) in remade.items() if 0 not in value.shape},
            nothing={name: (tuple(value.shape), value.dtype) for name, (_, value) in remade.items() if 0 in value.shape},
        )

    def _counts(self, declared: Stateful) -> dict[str, Size]:
        return {name: size_of(self.arguments[name]) for name in declared.counts if name in self.arguments}

    def _block(self, block: int | str) -> int:
        found = block if isinstance(block, int) else self.arguments.get(block)
        if not isinstance(found, int) or found < 1:
            raise NotStatefulError(f"blocks of {block}={found} rows")
        return found

    def _part(self, number: int) -> StatefulResult:
        value = _tensor(self.results[number], f"result {number}")
        return StatefulResult(number, _dim(self.made[number], value), value.dtype)


def listed(results: Any) -> list[Any]:
    return list(results) if isinstance(results, (tuple, list)) else [results]


# -- what has to hold of a call


def _tensor(value: Any, what: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise NotStatefulError(f"{what} that is no tensor")
    return value


def _dim(dim: int | None, value: Any) -> int | None:
    if dim is None or not isinstance(value, Tensor):
        return None
    if not -value.dim() <= dim < value.dim():
        raise NotStatefulError(f"a tensor of {value.dim()} dimensions, where rows are said to run along dimension {dim}")
    return dim % value.dim()


def _absent(states: Mapping[str, tuple[Any, Tensor]]) -> frozenset[str]:
    """States that a call leaves out, by None or by a tensor of nothing; the others are as they are after the last row."""
    found = {name for name, (state, last) in states.items() if state is None or _is_empty(state, last)}
    for name, (state, last) in states.items():
        if name not in found:
            _check_state(name, state, last)
    return frozenset(found)


def _is_empty(state: Any, last: Tensor) -> bool:
    return isinstance(state, Tensor) and 0 in shape_of(state) and 0 not in shape_of(last)


def _is_nothing_but(value: Any, asked: Any) -> bool:
    return not isinstance(value, Tensor) and type(value) is type(asked) and bool(value == asked)


def _check_state(argument: str, state: Any, last: Any) -> None:
    """A state that leaves as another kind of tensor than it came cannot be handed on."""
    if not isinstance(state, Tensor) or shape_of(state) != shape_of(last):
        raise NotStatefulError(f"{argument} of another shape than what is left of it after the last row")
    if torch.promote_types(state.dtype, last.dtype) != last.dtype:
        raise NotStatefulError(f"{argument} in {state.dtype}, of which {last.dtype} does not hold all numbers")


def _check_lengths(tensors: Mapping[str, tuple[Tensor, int]], counts: Mapping[str, Size]) -> None:
    lengths = {**{name: size_of(value.shape[dim]) for name, (value, dim) in tensors.items()}, **counts}
    if len(set(lengths.values())) != 1:
        raise NotStatefulError(f"other numbers of rows: {', '.join(f'{name} {size}' for name, size in lengths.items())}")


# -- memory


def _slots(states: Sequence[tuple[str, int, Tensor]]) -> tuple[tuple[StateSlot, ...], Size]:
    """Where each state lies in the carry, and the bytes of all; the size of one dimension may be known only when it runs."""
    shapes = [shape_of(value) for _, _, value in states]
    unknown = [size for shape in shapes for size in shape if not isinstance(size, int)]
    if len(unknown) > 1 or (unknown and len(states) > 1):
        raise NotStatefulError("a state of which several sizes change from call to call")
    if unknown:
        ((argument, number, value),) = states
        shape = tuple(size if isinstance(size, int) else -1 for size in shapes[0])
        return (StateSlot(argument, number, 0, None, shape, value.dtype),), product((*shapes[0], value.dtype.itemsize))
    slots: list[StateSlot] = []
    start = 0
    for (argument, number, value), shape in zip(states, shapes, strict=True):
        sizes = tuple(map(int, shape))
        stop = start + prod(sizes) * value.dtype.itemsize
        slots.append(StateSlot(argument, number, start, stop, sizes, value.dtype))
        start = -(-stop // ALIGNED) * ALIGNED
    return tuple(slots), start


def _order(value: Tensor) -> tuple[int, ...]:
    """The dimensions of a value from the outermost to the innermost, as it lies in memory; those that it is repeated along
    outside of the next that it is not.
    """
    strides = [size_hint(stride) for stride in value.stride()]
    for dim in reversed(range(value.dim() - 1)):
        strides[dim] = strides[dim] or strides[dim + 1]
    return tuple(sorted(range(value.dim()), key=lambda dim: -strides[dim]))
