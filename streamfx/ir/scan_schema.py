"""Schemas of operators with a state: which argument is the state before the first row, and which result the last state.

    scan(x, decay, first) -> y, last                                  from the first row to the last
    scan_backward(dy, dlast, x, decay, first) -> dx, ddecay, dfirst   from the last row to the first

`forward_plan` and `backward_plan` plan a call of either operator chunk by chunk (`StatefulPlan`): each chunk is a call on its
own rows. The last states of a chunk are the initial states of the next one; between chunks, one byte vector holds them, the
*carry*. In a backward, the states are the gradients of the forward's states, and chunks run from last to first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from streamfx.ir.recurrence import RecurrenceAxes, Slot, aligned, separate_axes
from streamfx.ir.sizes import Size, product, shape_of, size_of
from streamfx.torch_private.symbolic_sizes import size_hint

ALIGNED = 16  # bytes: the alignment of values in the carry, sufficient for each dtype


@dataclass(frozen=True)
class Stateful:
    """The declaration of an operator with a state and of its backward.

    `operators`: the names of both in graphs.
    `rows`: by argument name, the dimension of its rows (the sequence), for each argument that has rows.
    `results`: the row dimension of each result; None if it has no rows.
    `states`: for each argument that is an initial state, the index of the result that is the state after the last row.
    `cotangents`, `saved`: for these arguments of the backward, the index of the result; the backward's other arguments
    have the names of the operator's arguments.
    `gradients`: for each result of the backward, the argument whose gradient it is.
    `always`: arguments that each chunk's calls pass with this value, for example a flag to return the last state.
    `only`: the one supported value of an argument, if a call passes it.
    `counts`: arguments that are the number of rows.
    `block`: chunks start at multiples of it; it may be the name of an argument.
    `nonpositive`: arguments that must provably be at most zero.
    `reverse`: the operator runs from the last row to the first (and has no backward).
    `is_kernel`: its arguments must be dense, at aligned addresses, and have at least one row.
    """

    name: str
    operators: tuple[str, str]
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    argument_names: tuple[str, ...]
    backward_argument_names: tuple[str, ...]
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
    nonpositive: tuple[str, ...] = ()
    reverse: bool = False
    is_kernel: bool = True

    @property
    def recomputed_per_chunk(self) -> dict[str, int]:
        """The saved results without rows, which each chunk recomputes: argument of the backward, index of the result."""
        return {name: result_index for name, result_index in self.saved.items() if self.results[result_index] is None}


class NotStatefulError(Exception):
    """A call that its declaration does not allow; the message completes "<operator> with ..."."""


@dataclass(frozen=True)
class StateSlot(Slot):
    """The slot of a state in the carry, its argument, and the index of its result."""

    argument: str
    result: int


@dataclass(frozen=True)
class StatefulResult:
    """A result that is used, and its row dimension. Without rows, it is a sum over chunks or a final state."""

    index: int
    row_dim: int | None
    dtype: torch.dtype


@dataclass(frozen=True)
class StatefulPlan:
    """A call of the operator or of its backward.

    `operands`: the arguments that are tensors, in order; `constants`: the other arguments.
    `row_dims`: the row dimension of each operand that has rows.
    `orders`: the dimensions of each operand in memory order, outermost first.
    `always`: arguments that a chunk's calls pass with this value.
    `absent`: states that the call omits; they start as zeros.
    `counts`: arguments that are the number of rows, so that a chunk passes its own number.
    `slots`, `carry_size`: where the carry holds each state, and the bytes of the carry.
    `reverse`: rows run from the last to the first.
    `forward_plan`: for a backward, the plan of the forward call, which recomputes `recomputed_per_chunk` for each chunk.
    `empty_results`: saved results without elements, which need no computation.
    """

    name: str
    function: Callable[..., Any]
    argument_names: frozenset[str]
    operands: tuple[str, ...]
    row_dims: Mapping[str, int]
    orders: Mapping[str, tuple[int, ...]]
    constants: Mapping[str, Any]
    always: Mapping[str, Any]
    absent: frozenset[str]
    counts: frozenset[str]
    slots: tuple[StateSlot, ...]
    carry_size: Size
    results: tuple[StatefulResult, ...]
    axes: RecurrenceAxes
    reverse: bool
    is_kernel: bool
    block: int = 1
    forward_plan: StatefulPlan | None = None
    recomputed_per_chunk: Mapping[str, int] = field(default_factory=dict)
    empty_results: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)


def forward_plan(declared: Stateful, arguments: Mapping[str, Any], used_results: Sequence[int]) -> tuple[StatefulPlan, list[Any]]:
    """Plan a call of the operator; return (plan, results). Its results are computed by calling it on fake tensors.

    `arguments` has the arguments by name, with fake tensors; `used_results` has the indices of the results that are used.

    Raises:
        NotStatefulError: if the declaration does not allow the call.
    """
    for name, value in declared.only.items():
        if name in arguments and not _is_exactly(arguments[name], value):
            raise NotStatefulError(f"another {name} than {value}")
    overrides = {name: value for name, value in declared.always.items() if name in declared.argument_names}
    results = listed(declared.forward(**{**arguments, **overrides}))
    last_states = {
        name: _require_tensor(results[result_index], f"result {result_index}") for name, result_index in declared.states.items()
    }
    absent = _absent_states({name: (arguments.get(name), last_state) for name, last_state in last_states.items()})
    slots, carry_size = _slots([(name, declared.states[name], last_state) for name, last_state in last_states.items()])
    call = _StatefulCall(arguments, overrides, absent, declared.rows, results, declared.results, used_results)
    return call.plan(declared, slots, carry_size, None), results


def backward_plan(
    declared: Stateful,
    forward: StatefulPlan,
    arguments: Mapping[str, Any],
    forward_results: Sequence[Any],
    used_results: Sequence[int],
) -> tuple[StatefulPlan, list[Any]]:
    """Plan the backward of a call whose plan is `forward`, with results `forward_results`; return (plan, results).

    The results are computed by calling the backward on fake tensors. If saved results are recomputed, `arguments` includes
    the arguments of the forward call. The carry holds the gradient of each state.

    Raises:
        NotStatefulError: if the gradient of a state is not a tensor of the state's shape, or the declaration is violated.
    """
    overrides = {name: value for name, value in declared.always.items() if name in declared.backward_argument_names}
    cotangent_of_result = {i: name for name, i in declared.cotangents.items()}
    last_states = {name: forward_results[i] for name, i in declared.states.items()}
    # Fake stand-ins, of which only shapes and dtypes matter: a chunk's initial states, and the cotangents of its last states,
    # are like the last states of the forward call. The graph's call may omit either.
    state_cotangents = {cotangent_of_result[i]: forward_results[i] for i in declared.states.values()}
    saved = {name: forward_results[i] for name, i in declared.saved.items()}
    call_arguments = {**saved, **arguments, **overrides, **last_states, **state_cotangents}
    results = listed(declared.backward(**{name: call_arguments[name] for name in declared.backward_argument_names}))
    # (argument that is the cotangent of the last state, index and value of the result that is the initial state's gradient)
    state_gradients: list[tuple[str, int, Tensor]] = []
    for name, last_state_index in declared.states.items():
        result_index = declared.gradients.index(name)
        gradient = _require_tensor(results[result_index], f"result {result_index}")
        state_gradients.append((cotangent_of_result[last_state_index], result_index, gradient))
        if shape_of(gradient) != shape_of(last_states[name]):
            raise NotStatefulError(f"a gradient of {name} whose shape differs from that of {name}")
    absent = _absent_states({name: (arguments.get(name), gradient) for name, _, gradient in state_gradients})
    slots, carry_size = _slots(state_gradients)
    row_dims: dict[str, int | None] = {**declared.rows}
    row_dims |= {name: declared.results[i] for name, i in {**declared.cotangents, **declared.saved}.items()}
    gradient_row_dims = [declared.rows.get(name) if name is not None else None for name in declared.gradients]
    call = _StatefulCall(arguments, overrides, absent, row_dims, results, gradient_row_dims, used_results, forward_results)
    return call.plan(declared, slots, carry_size, forward), results


@dataclass(frozen=True)
class _StatefulCall:
    """The facts about a call of an operator with a state, or of its backward.

    `row_dims`, `result_row_dims`: the declared row dimension of each argument and result, or None. `overrides`: arguments
    that each chunk passes instead. `absent`: omitted states. `forward_results`: for a backward, the results of the forward
    call.
    """

    arguments: Mapping[str, Any]
    overrides: Mapping[str, Any]
    absent: frozenset[str]
    row_dims: Mapping[str, int | None]
    results: Sequence[Any]
    result_row_dims: Sequence[int | None]
    used_results: Sequence[int]
    forward_results: Sequence[Any] = ()

    def plan(
        self, declared: Stateful, slots: tuple[StateSlot, ...], carry_size: Size, forward: StatefulPlan | None
    ) -> StatefulPlan:
        """Build the plan of the call. `forward` is the plan of the forward call if this is a backward call, else None.

        Raises:
            NotStatefulError: if no operand has rows, or if operands and results have different numbers of rows.
        """
        tensors = {name: value for name, value in self.arguments.items() if isinstance(value, Tensor)}
        row_dims = {name: dim for name, value in tensors.items() if (dim := _row_dim(self.row_dims.get(name), value)) is not None}
        if not row_dims:
            raise NotStatefulError("no operand with rows")
        result_schemas = tuple(map(self._result_schema, self.used_results))
        values_with_rows = {name: (tensors[name], dim) for name, dim in row_dims.items()}
        values_with_rows |= {
            f"result {result.index}": (self.results[result.index], result.row_dim)
            for result in result_schemas
            if result.row_dim is not None
        }
        _check_lengths(values_with_rows, self._counts(declared))
        is_forward = forward is None
        absent = self.absent if forward is None else self.absent | forward.absent
        recomputed_per_chunk = (
            {} if is_forward else {name: (i, self.forward_results[i]) for name, i in declared.recomputed_per_chunk.items()}
        )
        return StatefulPlan(
            name=declared.name if is_forward else f"{declared.name}_backward",
            function=declared.forward if is_forward else declared.backward,
            argument_names=frozenset(declared.argument_names if is_forward else declared.backward_argument_names),
            operands=tuple(tensors),
            row_dims=row_dims,
            orders={name: _memory_order(value) for name, value in tensors.items() if name not in absent},
            constants={key: value for key, value in self.arguments.items() if key not in tensors and key not in declared.counts},
            always=self.overrides,
            absent=self.absent,
            counts=declared.counts,
            slots=slots,
            carry_size=carry_size,
            results=result_schemas,
            axes=separate_axes(
                [(shape_of(value), row_dims.get(name)) for name, value in tensors.items()],
                [(shape_of(self.results[result.index]), result.row_dim) for result in result_schemas],
            ),
            reverse=declared.reverse or not is_forward,
            is_kernel=declared.is_kernel,
            block=self._block(declared.block),
            forward_plan=forward,
            recomputed_per_chunk={name: i for name, (i, value) in recomputed_per_chunk.items() if 0 not in value.shape},
            empty_results={
                name: (tuple(value.shape), value.dtype) for name, (_, value) in recomputed_per_chunk.items() if 0 in value.shape
            },
        )

    def _counts(self, declared: Stateful) -> dict[str, Size]:
        """Return the arguments of the call that are the number of rows, by name."""
        return {name: size_of(self.arguments[name]) for name in declared.counts if name in self.arguments}

    def _block(self, block: int | str) -> int:
        """Return the rows per block: `block`, or the argument of this name, which must be a positive integer."""
        num_rows = block if isinstance(block, int) else self.arguments.get(block)
        if not isinstance(num_rows, int) or num_rows < 1:
            raise NotStatefulError(f"blocks of {block}={num_rows} rows")
        return num_rows

    def _result_schema(self, result_index: int) -> StatefulResult:
        """Return the index, row dimension, and dtype of a result, which must be a tensor."""
        value = _require_tensor(self.results[result_index], f"result {result_index}")
        return StatefulResult(result_index, _row_dim(self.result_row_dims[result_index], value), value.dtype)


def listed(results: Any) -> list[Any]:
    """Return the results of an operator as a list."""
    return list(results) if isinstance(results, (tuple, list)) else [results]


# -- conditions on a call


def _require_tensor(value: Any, label: str) -> Tensor:
    """Return a value if it is a tensor; otherwise raise `NotStatefulError`."""
    if not isinstance(value, Tensor):
        raise NotStatefulError(f"{label} that is not a tensor")
    return value


def _row_dim(dim: int | None, value: Any) -> int | None:
    """Return a row dimension as a nonnegative index; None if the value has no rows or is not a tensor."""
    if dim is None or not isinstance(value, Tensor):
        return None
    if not -value.dim() <= dim < value.dim():
        raise NotStatefulError(f"a tensor of {value.dim()} dimensions, declared to have rows along dimension {dim}")
    return dim % value.dim()


def _absent_states(states: Mapping[str, tuple[Any, Tensor]]) -> frozenset[str]:
    """Return the names of states that a call omits, by None or by an empty tensor; check the other states.

    `states` has (initial state of the call, last state) for each name. Each chunk's last state is the next chunk's initial
    state, so both need the same shape.
    """
    absent = {name for name, (state, last_state) in states.items() if state is None or _is_empty(state, last_state)}
    for name, (state, last_state) in states.items():
        if name not in absent:
            _check_state(name, state, last_state)
    return frozenset(absent)


def _is_empty(state: Any, last_state: Tensor) -> bool:
    """Return whether a state has no elements although the last state has some: the call omits it."""
    return isinstance(state, Tensor) and 0 in shape_of(state) and 0 not in shape_of(last_state)


def _is_exactly(value: Any, expected: Any) -> bool:
    """Return whether a value is equal to `expected`, and of the same type: 1 is not True. False for tensors."""
    return not isinstance(value, Tensor) and type(value) is type(expected) and bool(value == expected)


def _check_state(argument: str, state: Any, last_state: Any) -> None:
    """Raise `NotStatefulError` unless the state has the last state's shape, and a dtype that the last one's represents exactly.

    Otherwise the carry could not hold both.
    """
    if not isinstance(state, Tensor) or shape_of(state) != shape_of(last_state):
        raise NotStatefulError(f"{argument} of another shape than the final state")
    if torch.promote_types(state.dtype, last_state.dtype) != last_state.dtype:
        raise NotStatefulError(
            f"{argument} in {state.dtype}, which the dtype of the final state, {last_state.dtype}, cannot represent"
        )


def _check_lengths(tensors: Mapping[str, tuple[Tensor, int]], counts: Mapping[str, Size]) -> None:
    """Raise `NotStatefulError` unless all tensors, given as (value, row dimension), and all counts have equally many rows."""
    lengths = {**{name: size_of(value.shape[dim]) for name, (value, dim) in tensors.items()}, **counts}
    if len(set(lengths.values())) != 1:
        raise NotStatefulError(f"different numbers of rows: {', '.join(f'{name} {size}' for name, size in lengths.items())}")


# -- memory


def _slots(states: Sequence[tuple[str, int, Tensor]]) -> tuple[tuple[StateSlot, ...], Size]:
    """Return where the carry holds each state, and its total bytes; `states` has (argument, index of result, last state).

    Slots are aligned to `ALIGNED` bytes. A size known only at run time is supported for a single state with one such size.
    """
    shapes = [shape_of(value) for _, _, value in states]
    unknown = [size for shape in shapes for size in shape if not isinstance(size, int)]
    if len(unknown) > 1 or (unknown and len(states) > 1):
        raise NotStatefulError("a state with several dynamic sizes")
    if unknown:
        ((argument, result_index, value),) = states
        shape = tuple(size if isinstance(size, int) else -1 for size in shapes[0])
        return (StateSlot(0, None, shape, value.dtype, argument, result_index),), product((*shapes[0], value.dtype.itemsize))
    slots: list[StateSlot] = []
    start = 0
    for (argument, result_index, value), shape in zip(states, shapes, strict=True):
        sizes = tuple(map(int, shape))
        stop = start + prod(sizes) * value.dtype.itemsize
        slots.append(StateSlot(start, stop, sizes, value.dtype, argument, result_index))
        start = aligned(stop, ALIGNED)
    return tuple(slots), start


def _memory_order(value: Tensor) -> tuple[int, ...]:
    """Return the dimensions of a value in memory order, outermost first.

    [b t c] that is stored as [t b c] -> (1, 0, 2). An expanded dimension (stride 0) comes just outside the next dimension
    that is not expanded.
    """
    strides = [size_hint(stride) for stride in value.stride()]
    for dim in reversed(range(value.dim() - 1)):
        strides[dim] = strides[dim] or strides[dim + 1]
    return tuple(sorted(range(value.dim()), key=lambda dim: -strides[dim]))
