"""How a transfer function is written down and looked up.

A row of the table says what an operator makes of ranges. It names the arguments that it knows; a call that gives any other is not
covered by it. Nothing is known of what an operator without a row makes, but its type.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

import sympy
import torch
from torch import fx

from streamfx.ir.joint import bound_arguments, is_size, is_tensor, results_of, shape_of_node, tensor_operands
from streamfx.ir.ranges import INFINITY, LONGEST, Number, Range, assumed_of, constant, everything, hull, in_type, scaled
from streamfx.ir.sizes import Size, size_of
from streamfx.node_meta import VALUE
from streamfx.torch_private import unset_fake_temporarily

Reader: TypeAlias = "Callable[[fx.Node], Range]"
Transfer: TypeAlias = "Callable[..., Range | tuple[Range, ...]]"
F = TypeVar("F", bound="Callable[..., Any]")

# What these say of a result is not in its numbers.
WITHOUT_MEANING = frozenset({"memory_format", "layout", "device", "pin_memory", "non_blocking", "implicit"})
CONDITIONS = frozenset({"condition", "mask"})  # arguments that are no operands of the arithmetic
HALF_TYPES = frozenset({torch.float16, torch.bfloat16})
CHOOSES = CONDITIONS | {"attn_mask"}  # arguments that say which numbers are taken, and how much of each


@dataclass(frozen=True)
class TransferFunction:
    """A transfer function; `names` are the arguments that it takes, `elementwise` operators get them as ranges in one type."""

    function: Transfer
    names: frozenset[str]
    elementwise: bool
    is_exact: bool = True
    takes_call: bool = True


TRANSFERS: dict[Any, TransferFunction] = {}


def elementwise(*operators: Any, exact: bool = True) -> Callable[[F], F]:
    """Register a function of ranges, named as the operator's arguments are. `exact`: every device rounds the result alike."""

    def register(function: F) -> F:
        names = frozenset(inspect.signature(function).parameters)
        for operator in operators:
            TRANSFERS[operator] = TransferFunction(function, names - {"call"}, True, exact, "call" in names)
        return function

    return register


def structural(*operators: Any, takes: str) -> Callable[[F], F]:
    """Register a function of a `RangeCall`, for operators that see more than one element; `takes` names the arguments it knows."""

    def register(function: F) -> F:
        for operator in operators:
            TRANSFERS[operator] = TransferFunction(function, frozenset(takes.split()), False)
        return function

    return register


@dataclass(frozen=True)
class RangeCall:
    """One node as a transfer function sees it."""

    node: fx.Node
    reader: Reader
    arguments: Mapping[str, Any]

    @property
    def dtype(self) -> torch.dtype:
        result = results_of(self.node)[0]
        assert result is not None
        return result.dtype

    def range(self, name: str) -> Range:
        """The range of a tensor, a number or a size."""
        return range_of_argument(self.arguments[name], self.reader)

    def ranges(self, name: str) -> list[Range]:
        """Those of a list of tensors."""
        return [range_of_argument(item, self.reader) for item in self.arguments[name]]

    def shape(self, name: str) -> tuple[Size, ...]:
        return shape_of_node(self.arguments[name])


def range_of_argument(item: Any, reader: Reader) -> Range:
    """What is known of an argument that stands for numbers."""
    if is_tensor(item):
        return reader(item)
    if is_size(item):
        return _range_of_size(item.meta[VALUE])
    return constant(item)


def _range_of_size(value: Any) -> Range:
    if isinstance(value, (bool, int, float)):
        return constant(value)
    if not isinstance(value, torch.SymInt):
        return everything(torch.bool if isinstance(value, torch.SymBool) else torch.float64)
    size = size_of(value)
    if isinstance(size, int):
        return constant(size)
    return Range(0, LONGEST) if isinstance(size, sympy.Symbol) and size.is_nonnegative else everything(torch.int64)


def longest(size: Size) -> int:
    """How long a dimension is at the most."""
    return size if isinstance(size, int) else LONGEST


def count_of(*sizes: Size) -> int:
    """How many elements there are at the most."""
    return math.prod(longest(size) for size in sizes)


def applied(node: fx.Node, reader: Reader) -> tuple[Range, ...]:
    """The range of each result of an operator, given those of its operands."""
    results = results_of(node)
    unknown = tuple(everything(torch.float64 if result is None else result.dtype) for result in results)
    row = TRANSFERS.get(node.target)
    if row is None or any(result is None or result.dtype.is_complex for result in results[:1]):
        return unknown
    arguments = named_arguments(node, row.names)
    if arguments is None:
        return unknown
    known = _elementwise(node, row, arguments, reader) if row.elementwise else row.function(RangeCall(node, reader, arguments))
    found = known if isinstance(known, tuple) else (known,)
    return tuple(
        everything(torch.float64)
        if result is None
        else replace(made := in_type(item, result.dtype), assumed=made.assumed or _assumed(node, row, reader, made))
        for item, result in zip((*found, *unknown[len(found) :]), results, strict=True)
    )


def _assumed(node: fx.Node, row: TransferFunction, reader: Reader, made: Range) -> Number:
    """Of the numbers that go into a result; where numbers say which others are taken, they do not."""
    operands = tensor_operands(node)
    if not row.elementwise:
        choose = [item for name, item in bound_arguments(node).items() if name in CHOOSES]
        return assumed_of([reader(item) for item in operands if item not in choose and item.meta[VALUE].is_floating_point()])
    numbers = [constant(item) for item in node.args if isinstance(item, (int, float))]
    return assumed_of([*map(reader, operands), *numbers], made)


def named_arguments(node: fx.Node, names: frozenset[str]) -> dict[str, Any] | None:
    """A node's arguments by name, defaults filled in; None where one is given that is not named."""
    arguments: dict[str, Any] = {}
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if position < len(node.args) and not argument.kwarg_only:
            value = node.args[position]
        else:
            value = node.kwargs.get(argument.name, argument.default_value)
        if argument.name in names:
            arguments[argument.name] = value
        elif argument.name not in WITHOUT_MEANING and not _is_same(value, argument.default_value):
            return None
    return arguments


def _is_same(value: Any, default: Any) -> bool:
    return value is default or (type(value) is type(default) and not isinstance(value, fx.Node) and value == default)


def _elementwise(node: fx.Node, row: TransferFunction, arguments: dict[str, Any], reader: Reader) -> Range | tuple[Range, ...]:
    """An operator on elements computes in one type: what its operands are in that type is what counts."""
    dtype = computed_in(node, arguments)
    if dtype is None:
        return ()
    known = {name: range_of_argument(item, reader) for name, item in arguments.items() if _is_numeric(item)}
    folded = _folded(node, row, known) if all(item.constant is not None for item in known.values()) else None
    if folded is not None:
        return folded
    converted = {name: item if name in CONDITIONS else _as_computed(item, arguments[name], dtype) for name, item in known.items()}
    more = {"call": RangeCall(node, reader, arguments)} if row.takes_call else {}
    found = row.function(**{**arguments, **converted, **more})
    if row.is_exact:
        return found
    return tuple(_at_ends(item, dtype) for item in found) if isinstance(found, tuple) else _at_ends(found, dtype)


def _at_ends(known: Range, dtype: torch.dtype) -> Range:
    """A function's range, wider where devices may differ: by what half types round on the way; to zero or to the least normal
    number below that number; and to infinity within the last two powers of two, where an intermediate result may overflow.
    """
    if not dtype.is_floating_point:
        return known
    ends = torch.finfo(dtype)
    rough = 2 * ends.eps if dtype in HALF_TYPES else 0  # which some round to on the way
    low, high = scaled(known.low, -rough), scaled(known.high, rough)
    if ends.tiny * 2.0**-60 < abs(low) < ends.tiny:  # what is 2^60 times less than that is zero on every device
        low = 0 if low > 0 else -ends.tiny
    if ends.tiny * 2.0**-60 < abs(high) < ends.tiny:
        high = ends.tiny if high > 0 else 0
    return replace(known, low=-INFINITY if low < -ends.max / 4 else low, high=INFINITY if high > ends.max / 4 else high)


def _as_computed(known: Range, argument: Any, dtype: torch.dtype) -> Range:
    """What an operand is in the type that is computed in. Beside half types a number may be kept in single precision: 1e-8 is not
    zero there, and 1e5 not infinite (ATen/native/cpu/BinaryOpsKernel.cpp: opmath_t, original_scalar_value).
    """
    held = in_type(known, dtype)
    is_number = not is_tensor(argument) or not argument.meta[VALUE].dim()
    return hull(held, in_type(known, torch.float32)) if is_number and dtype in HALF_TYPES else held


def _is_numeric(item: Any) -> bool:
    return is_tensor(item) or is_size(item) or isinstance(item, (bool, int, float))


def computed_in(node: fx.Node, arguments: Mapping[str, Any]) -> torch.dtype | None:
    """The type that an operator converts its operands to: that of its result, or what its operands have in common."""
    result = results_of(node)[0]
    assert result is not None
    if result.dtype != torch.bool:
        return result.dtype
    operands = [_for_type(item) for name, item in arguments.items() if name not in CONDITIONS and _is_numeric(item)]
    if len(operands) == 1 and isinstance(operands[0], torch.Tensor):
        return operands[0].dtype
    dtype = torch.result_type(*operands) if len(operands) == 2 else torch.complex64
    return None if dtype.is_complex else dtype


def _for_type(item: Any) -> Any:
    """A stand-in whose type and rank count as those of the argument do."""
    if is_tensor(item):
        value = item.meta[VALUE]
        return torch.empty((0,) * value.dim(), dtype=value.dtype, device="cpu")
    if is_size(item):
        value = item.meta[VALUE]
        return value if isinstance(value, (bool, int, float)) else (1.0 if isinstance(value, torch.SymFloat) else 1)
    return item


def _folded(node: fx.Node, row: TransferFunction, known: Mapping[str, Range]) -> Range | None:
    """The operator itself, on numbers that are all known, but for the sign of a zero."""
    named = named_arguments(node, row.names) or {}
    numbers = {item: known[name].constant for name, item in named.items() if name in known and isinstance(item, fx.Node)}
    expected = results_of(node)[0]
    if not row.is_exact and any(number is not None and math.isinf(number) for number in numbers.values()):
        return None  # a function's value there differs from device to device
    if expected is None or not any(is_tensor(item) for item in numbers) or len(numbers) < len(set(node.all_input_nodes)):
        return None
    found = [_computed(node, dict(zip(numbers, signed, strict=True)), expected.dtype) for signed in _signed(numbers)]
    made = [constant(number) if row.is_exact else about(number) for number in found if number is not None]
    if len(made) < len(found):
        return None
    return hull(*made) if row.is_exact else _at_ends(hull(*made), expected.dtype)


def _signed(numbers: Mapping[fx.Node, Number | None]) -> Iterator[tuple[Any, ...]]:
    """The numbers with each zero of either sign: equal to all that compares them, not to what divides by them."""
    return itertools.product(
        *(
            (-0.0, 0.0) if number == 0 and is_tensor(item) and item.meta[VALUE].is_floating_point() else (number,)
            for item, number in numbers.items()
        )
    )


def _computed(node: fx.Node, numbers: Mapping[fx.Node, Any], dtype: torch.dtype) -> Number | None:
    """What an operator makes of operands that have one element each; None where it makes anything else, or nothing."""

    def stand_in(item: fx.Node) -> Any:
        value = item.meta[VALUE]
        return (
            torch.full((1,) * value.dim(), numbers[item], dtype=value.dtype, device="cpu") if is_tensor(item) else numbers[item]
        )

    with unset_fake_temporarily():
        try:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), stand_in)
            kwargs = {name: value for name, value in kwargs.items() if name not in WITHOUT_MEANING}
            result = node.target(*args, **kwargs)  # type: ignore[operator]
        except (RuntimeError, TypeError, ValueError, NotImplementedError, OverflowError):
            return None
        is_one = isinstance(result, torch.Tensor) and result.dtype == dtype and result.numel() == 1
        return result.item() if is_one else None


def about(number: float) -> Range:
    """A function's value: devices round it differently in the last digits."""
    if number in (0, 1) or number != number or math.isinf(number):
        return constant(number)
    return Range(number - 1e-3 * abs(number), number + 1e-3 * abs(number))
