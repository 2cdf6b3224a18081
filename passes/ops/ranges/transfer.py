"""Registration and lookup of transfer functions, which map the ranges of operands to the range of a result.

A `Range` bounds every element of a value: it lies in [low, high], or may be NaN if `nan` is set. `assumed` is nonzero if it
relies on the assumption that weights and activations are ordinary numbers. A `Reader` returns the range of a node. A row of
the table names the arguments that it knows; a call with any other argument is not covered. For an operator without a row,
only the range of its dtype is known.
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

from streamfx.ir.joint import (
    bound_arguments,
    is_size,
    is_tensor,
    results_of,
    schema_arguments,
    shape_of_node,
    tensor_operands,
)
from streamfx.ir.ranges import INFINITY, MAX_ROWS, Number, Range, assumed_growth, cast_range, constant, full_range, hull, scaled
from streamfx.ir.sizes import Size, size_of
from streamfx.node_meta import VALUE
from streamfx.torch_private import unset_fake_temporarily

Reader: TypeAlias = "Callable[[fx.Node], Range]"
Transfer: TypeAlias = "Callable[..., Range | tuple[Range, ...]]"
F = TypeVar("F", bound="Callable[..., Any]")

# These arguments do not affect the numbers of a result.
IGNORED_ARGUMENTS = frozenset({"memory_format", "layout", "device", "pin_memory", "non_blocking", "implicit"})
CONDITIONS = frozenset({"condition", "mask"})  # arguments that are not operands of the arithmetic
HALF_TYPES = frozenset({torch.float16, torch.bfloat16})
SELECTORS = CONDITIONS | {"attn_mask"}  # arguments that select numbers, or weight them


@dataclass(frozen=True)
class TransferFunction:
    """A row of the table.

    `names`: the operator's arguments that `function` knows.
    `elementwise`: the function gets each argument's range, converted to the dtype of the computation; otherwise a `RangeCall`.
    `is_exact`: all devices return the same numbers; otherwise, the range is widened.
    `takes_call`: an elementwise function gets the `RangeCall`, too.
    """

    function: Transfer
    names: frozenset[str]
    elementwise: bool
    is_exact: bool = True
    takes_call: bool = True


TRANSFERS: dict[Any, TransferFunction] = {}


def elementwise(*operators: Any, exact: bool = True) -> Callable[[F], F]:
    """Decorator: register the transfer function of elementwise operators.

    Its parameters have the names of the operator's arguments, and get their ranges; a parameter `call` gets the `RangeCall`.
    If not `exact`, devices differ in the last digits, and the result is widened.
    """

    def register(function: F) -> F:
        """Put the function into the table for each operator; return it unchanged."""
        names = frozenset(inspect.signature(function).parameters)
        for operator in operators:
            TRANSFERS[operator] = TransferFunction(
                function, names - {"call"}, elementwise=True, is_exact=exact, takes_call="call" in names
            )
        return function

    return register


def structural(*operators: Any, arguments: str | None = None) -> Callable[[F], F]:
    """Decorator: register the transfer function, of a `RangeCall`, of operators that are not elementwise.

    `arguments`: the names of the arguments that it knows, as in "self dim keepdim"; other arguments must have their default.
    By default, it knows all.
    """

    def register(function: F) -> F:
        """Put the function into the table for each operator; return it unchanged."""
        for operator in operators:
            names = [item.name for item in operator._schema.arguments] if arguments is None else arguments.split()
            TRANSFERS[operator] = TransferFunction(function, frozenset(names), elementwise=False)
        return function

    return register


@dataclass(frozen=True)
class RangeCall:
    """One call of an operator, as the argument of a transfer function: `reader` has ranges of nodes, `arguments` by name."""

    node: fx.Node
    reader: Reader
    arguments: Mapping[str, Any]

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the first result."""
        result = results_of(self.node)[0]
        assert result is not None
        return result.dtype

    def range(self, name: str) -> Range:
        """Return the range of the argument `name`: a tensor, a number or a size."""
        return range_of_argument(self.arguments[name], self.reader)

    def ranges(self, name: str) -> list[Range]:
        """Return the range of each tensor in the argument `name`, a list."""
        return [range_of_argument(item, self.reader) for item in self.arguments[name]]

    def shape(self, name: str) -> tuple[Size, ...]:
        """Return the shape of a tensor argument."""
        return shape_of_node(self.arguments[name])


def range_of_argument(item: Any, reader: Reader) -> Range:
    """Return the range of a numeric argument: of a tensor, from `reader`; of a size, its bounds; a number is a constant."""
    if is_tensor(item):
        return reader(item)
    if is_size(item):
        return _range_of_size(item.meta[VALUE])
    return constant(item)


def _range_of_size(value: Any) -> Range:
    """Return the range of the value of a node that is a size: a number, a dynamic size (0 to 2^31 - 1), or unknown."""
    if isinstance(value, (bool, int, float)):
        return constant(value)
    if not isinstance(value, torch.SymInt):
        return full_range(torch.bool if isinstance(value, torch.SymBool) else torch.float64)
    size = size_of(value)
    if isinstance(size, int):
        return constant(size)
    return Range(0, MAX_ROWS) if isinstance(size, sympy.Symbol) and size.is_nonnegative else full_range(torch.int64)


def max_size(size: Size) -> int:
    """Return a dimension's size, or its upper bound (2^31 - 1) if it is dynamic."""
    return size if isinstance(size, int) else MAX_ROWS


def max_num_elements(*sizes: Size) -> int:
    """Return an upper bound of the number of elements of a tensor with these sizes: dynamic sizes count as 2^31 - 1."""
    return math.prod(max_size(size) for size in sizes)


def evaluate_transfer(node: fx.Node, reader: Reader) -> tuple[Range, ...]:
    """Return the range of each result of an operator, given the ranges of its operands (`reader`).

    Each is converted to the result's dtype, and notes if it relies on assumed magnitudes. Without a transfer function for
    this call, only the range of the dtype is known.
    """
    results = results_of(node)
    unknown = tuple(full_range(torch.float64 if result is None else result.dtype) for result in results)
    transfer = TRANSFERS.get(node.target)
    if transfer is None or any(result is None or result.dtype.is_complex for result in results[:1]):
        return unknown
    arguments = named_arguments(node, transfer.names)
    if arguments is None:
        return unknown
    found_ranges = (
        _elementwise(node, transfer, arguments, reader)
        if transfer.elementwise
        else transfer.function(RangeCall(node, reader, arguments))
    )
    ranges = found_ranges if isinstance(found_ranges, tuple) else (found_ranges,)
    found = []
    for item, result in zip((*ranges, *unknown[len(ranges) :]), results, strict=True):
        in_type = full_range(torch.float64) if result is None else cast_range(item, result.dtype)
        growth = 0 if result is None or in_type.assumed else _assumed_growth(node, transfer, reader, in_type)
        found.append(Range(in_type.low, in_type.high, in_type.nan, growth) if growth else in_type)
    return tuple(found)


def _assumed_growth(node: fx.Node, transfer: TransferFunction, reader: Reader, result_range: Range) -> Number:
    """Return by which factor a result has grown from weights or activations whose magnitude is assumed; 0 for none.

    Arguments that only select elements, such as masks, do not count.
    """
    operands = tensor_operands(node)
    if not transfer.elementwise:
        selectors = [item for name, item in bound_arguments(node).items() if name in SELECTORS]
        return assumed_growth(
            [reader(item) for item in operands if item not in selectors and item.meta[VALUE].is_floating_point()]
        )
    numbers = [constant(item) for item in node.args if isinstance(item, (int, float))]
    return assumed_growth([*map(reader, operands), *numbers], result_range)


def named_arguments(node: fx.Node, names: frozenset[str]) -> dict[str, Any] | None:
    """Return a node's arguments by name, of those in `names`, with defaults filled in.

    None if another argument differs from its default, except for those that do not affect numbers (`device` ...).
    """
    arguments = bound_arguments(node)
    defaults = {name: default for name, default, _ in schema_arguments(node.target) if name not in names}
    for name, default in defaults.items():
        if not _is_default(arguments.pop(name), default) and name not in IGNORED_ARGUMENTS:
            return None
    return arguments


def _is_default(value: Any, default: Any) -> bool:
    """Return whether an argument equals its default, with the same type."""
    return value is default or (type(value) is type(default) and not isinstance(value, fx.Node) and value == default)


def _elementwise(
    node: fx.Node, transfer: TransferFunction, arguments: dict[str, Any], reader: Reader
) -> Range | tuple[Range, ...]:
    """Apply the transfer function of an elementwise operator to its operands' ranges, in the dtype of the computation.

    Return the range of the result, or a tuple of one per result. If all operands are constants, run the operator itself on
    them instead. `()`, no known range, for complex numbers.
    """
    dtype = computation_dtype(node, arguments)
    if dtype is None:
        return ()
    range_of = {name: range_of_argument(value, reader) for name, value in arguments.items() if _is_numeric(value)}
    constant_result = (
        _constant_result(node, transfer, range_of) if all(value.constant is not None for value in range_of.values()) else None
    )
    if constant_result is not None:
        return constant_result
    converted = {
        name: value if name in CONDITIONS else _in_computation_dtype(value, arguments[name], dtype)
        for name, value in range_of.items()
    }
    call_keyword = {"call": RangeCall(node, reader, arguments)} if transfer.takes_call else {}
    results = transfer.function(**{**arguments, **converted, **call_keyword})
    if transfer.is_exact:
        return results
    return (
        tuple(_widen_for_devices(value, dtype) for value in results)
        if isinstance(results, tuple)
        else _widen_for_devices(results, dtype)
    )


def _widen_for_devices(value_range: Range, dtype: torch.dtype) -> Range:
    """Widen the range of a function such as `exp`, computed in `dtype`, by the differences between devices.

    Half types round intermediate results. Subnormal results may be flushed to zero or rounded up to the least normal
    number. Results within the last two powers of two may be infinite, because an intermediate result may overflow.
    """
    if not dtype.is_floating_point:
        return value_range
    limits = torch.finfo(dtype)
    rounding = 2 * limits.eps if dtype in HALF_TYPES else 0  # some devices round intermediate results
    low, high = scaled(value_range.low, -rounding), scaled(value_range.high, rounding)
    if limits.tiny * 2.0**-60 < abs(low) < limits.tiny:  # numbers 2^60 times smaller are zero on every device
        low = 0 if low > 0 else -limits.tiny
    if limits.tiny * 2.0**-60 < abs(high) < limits.tiny:
        high = limits.tiny if high > 0 else 0
    return replace(value_range, low=-INFINITY if low < -limits.max / 4 else low, high=INFINITY if high > limits.max / 4 else high)


def _in_computation_dtype(value_range: Range, argument: Any, dtype: torch.dtype) -> Range:
    """Return the range of an operand (`argument`: node or number) after its conversion to the dtype of the computation.

    With half-precision tensors, a scalar may be kept in single precision: 1e-8 is not zero there, and 1e5 is not
    infinite (ATen/native/cpu/BinaryOpsKernel.cpp: opmath_t, original_scalar_value).
    """
    in_dtype = cast_range(value_range, dtype)
    is_number = not is_tensor(argument) or not argument.meta[VALUE].dim()
    return hull(in_dtype, cast_range(value_range, torch.float32)) if is_number and dtype in HALF_TYPES else in_dtype


def _is_numeric(item: Any) -> bool:
    """Return whether an argument is a tensor, a size or a number."""
    return is_tensor(item) or is_size(item) or isinstance(item, (bool, int, float))


def computation_dtype(node: fx.Node, arguments: Mapping[str, Any]) -> torch.dtype | None:
    """Return the dtype to which an elementwise operator converts its operands: its result's.

    For comparisons, whose result is boolean, the promoted type of the operands; None if that is complex or unknown.
    """
    result = results_of(node)[0]
    assert result is not None
    if result.dtype != torch.bool:
        return result.dtype
    operands = [_promotion_placeholder(item) for name, item in arguments.items() if name not in CONDITIONS and _is_numeric(item)]
    if len(operands) == 1 and isinstance(operands[0], torch.Tensor):
        return operands[0].dtype
    dtype = torch.result_type(*operands) if len(operands) == 2 else torch.complex64
    return None if dtype.is_complex else dtype


def _promotion_placeholder(item: Any) -> Any:
    """Return a stand-in for an argument, for `torch.result_type`: an empty tensor of its dtype and rank, or a number."""
    if is_tensor(item):
        value = item.meta[VALUE]
        return torch.empty((0,) * value.dim(), dtype=value.dtype, device="cpu")
    if is_size(item):
        value = item.meta[VALUE]
        return value if isinstance(value, (bool, int, float)) else (1.0 if isinstance(value, torch.SymFloat) else 1)
    return item


def _constant_result(node: fx.Node, transfer: TransferFunction, range_by_name: Mapping[str, Range]) -> Range | None:
    """Run an operator whose operands all have constant ranges (`range_by_name`); return the range of its results.

    It runs on one-element tensors, once for each sign of each zero. None if that fails, no operand is a tensor, or devices
    may differ.
    """
    arguments = named_arguments(node, transfer.names) or {}
    numbers = {
        item: range_by_name[name].constant
        for name, item in arguments.items()
        if name in range_by_name and isinstance(item, fx.Node)
    }
    expected = results_of(node)[0]
    if not transfer.is_exact and any(number is not None and math.isinf(number) for number in numbers.values()):
        return None  # devices differ in a function's value at infinity
    if expected is None or not any(is_tensor(item) for item in numbers) or len(numbers) < len(set(node.all_input_nodes)):
        return None
    values = [
        _run_on_constants(node, dict(zip(numbers, signed, strict=True)), expected.dtype)
        for signed in _with_both_zero_signs(numbers)
    ]
    ranges = [constant(number) if transfer.is_exact else widen_constant(number) for number in values if number is not None]
    if len(ranges) < len(values):
        return None
    return hull(*ranges) if transfer.is_exact else _widen_for_devices(hull(*ranges), expected.dtype)


def _with_both_zero_signs(numbers: Mapping[fx.Node, Number | None]) -> Iterator[tuple[Any, ...]]:
    """Yield tuples of the operands' numbers: all combinations of signs of zeros, for example (1, -0.0) and (1, 0.0).

    Ranges do not distinguish zeros, but divisions do.
    """
    return itertools.product(
        *(
            (-0.0, 0.0) if number == 0 and is_tensor(item) and item.meta[VALUE].is_floating_point() else (number,)
            for item, number in numbers.items()
        )
    )


def _run_on_constants(node: fx.Node, numbers: Mapping[fx.Node, Any], dtype: torch.dtype) -> Number | None:
    """Run a node's operator on one-element operands that hold `numbers`; return the resulting number.

    None if it fails, or if its result is not one element of `dtype`.
    """

    def placeholder(item: fx.Node) -> Any:
        """Return a one-element tensor that holds the operand's number, or the number of a size."""
        value = item.meta[VALUE]
        return (
            torch.full((1,) * value.dim(), numbers[item], dtype=value.dtype, device="cpu") if is_tensor(item) else numbers[item]
        )

    with unset_fake_temporarily():
        try:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), placeholder)
            kwargs = {name: value for name, value in kwargs.items() if name not in IGNORED_ARGUMENTS}
            result = node.target(*args, **kwargs)  # type: ignore[operator]
        except (RuntimeError, TypeError, ValueError, NotImplementedError, OverflowError):
            return None
        is_single = isinstance(result, torch.Tensor) and result.dtype == dtype and result.numel() == 1
        return result.item() if is_single else None


def widen_constant(number: float) -> Range:
    """Return the range of 0.1 % around a function's value, because devices round its last digits differently.

    0, 1, infinities and NaN are exact on all devices.
    """
    if number in (0, 1) or number != number or math.isinf(number):
        return constant(number)
    return Range(number - 1e-3 * abs(number), number + 1e-3 * abs(number))
