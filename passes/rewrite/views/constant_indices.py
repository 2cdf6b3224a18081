"""Prove that index tensors that depend on no input enumerate the rows of a flattened view.

    x[arange(b * t).view(b, t), labels]            x[arange(b)[:, None] * t + arange(t), labels]
    x[arange(b).repeat_interleave(t), arange(t).repeat(b), labels.flatten()]

So the index selects one element for each row of the flattened view [b t], in order. The index is evaluated at compile time
and compared with the expected indices. If sizes are dynamic, only a view of a vector 0, 1, 2, ... is recognized.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from streamfx.ir.joint import bound_arguments, is_tensor, node_argument, shape_of_node
from streamfx.ir.operator_table import ARITHMETIC, MOVES_ELEMENTS, Kind, is_kind, of_kind
from streamfx.ir.ranges import is_exact_in
from streamfx.ir.sizes import Size, product
from streamfx.node_meta import CONSTANT, VALUE
from streamfx.passes.ops.ranges.transfer import max_size
from streamfx.passes.rewrite.views.iota_index import INDEX_DTYPES, find_repeats
from streamfx.torch_private import unset_fake_temporarily

aten = torch.ops.aten
MAX_EVALUATED = 2**22  # largest number of elements of an index that is evaluated
IGNORED_ARGUMENTS = ("device", "layout", "pin_memory", "memory_format")  # arguments that do not change the elements
EVALUATED = (
    ARITHMETIC
    | MOVES_ELEMENTS
    | of_kind(
        *(Kind.CAST, Kind.REPEAT, Kind.SLICE, Kind.SELECT, Kind.CONCAT, Kind.STACK, Kind.ARANGE, Kind.FILL, Kind.FLOOR_DIVIDE)
    )
)


def enumerate_rows(indices: Sequence[fx.Node], rows: tuple[Size, ...], shape: tuple[Size, ...]) -> bool:
    """Return whether index tensors, one for each dimension of `rows`, select all elements once, in row-major order.

    The tensors broadcast to `shape`. For rows (2, 3) and shape (6,), the indices are 0 0 0 1 1 1 and 0 1 2 0 1 2.
    """
    if product(shape) != product(rows):
        return False
    if len(indices) == 1 and _is_view_of_arange(indices[0], rows[0], shape):
        return True
    count = product(shape)
    if not isinstance(count, int) or count > MAX_EVALUATED or not all(isinstance(size, int) for size in (*rows, *shape)):
        return False
    if not all(_broadcasts_to(shape_of_node(index), shape) for index in indices):
        return False
    with unset_fake_temporarily():
        evaluated: dict[fx.Node, Tensor | None] = {}
        tensors = [_evaluate(index, evaluated) for index in indices]
        if any(tensor is None for tensor in tensors):
            return False
        expected = torch.arange(count).view(shape)  # type: ignore[arg-type]
        for size, tensor in zip(reversed(rows), reversed(tensors), strict=True):
            if not torch.equal(tensor.expand(shape).long(), expected % size):  # type: ignore[union-attr]
                return False
            expected = expected // size
    return True


def is_strided_arange(node: fx.Node, step: int) -> bool:
    """Return whether a vector is proven to be 0, step, 2 * step, ..., and its dtype holds all of these exactly."""
    if node.target is aten.arange.start_step:
        arguments = bound_arguments(node)
        is_held = is_exact_in(node.meta[VALUE].dtype, 0, step * max_size(shape_of_node(node)[0]))
        if is_held and (arguments["start"], arguments["step"]) == (0, step):
            return True
    with unset_fake_temporarily():
        numbers = _evaluate(node, {})
        return numbers is not None and numbers.dim() == 1 and torch.equal(numbers.long(), torch.arange(len(numbers)) * step)


def _evaluate(node: fx.Node, evaluated: dict[fx.Node, Tensor | None]) -> Tensor | None:
    """Return the elements of an integer tensor, computed on the CPU; None if it depends on inputs or on an unknown operator.

    Also None if a value has a dynamic shape or more than `MAX_EVALUATED` elements. `evaluated` caches the results.
    """
    if node not in evaluated:
        value = node.meta.get(VALUE)
        is_index = (
            isinstance(value, Tensor) and value.dtype in INDEX_DTYPES and all(isinstance(size, int) for size in value.shape)
        )
        evaluated[node] = _run_on_cpu(node, evaluated) if is_index and math.prod(value.shape) <= MAX_EVALUATED else None  # type: ignore[union-attr]
    return evaluated[node]


def _run_on_cpu(node: fx.Node, evaluated: dict[fx.Node, Tensor | None]) -> Tensor | None:
    """Return the result of a node's operator for its operands' elements, or the constant that the node is.

    Return None if an operand is not known, the operator is not in `EVALUATED`, or the shape or dtype is not the traced one.
    """
    constant = node.meta.get(CONSTANT)
    if isinstance(constant, Tensor):
        return constant.cpu()
    if node.op != "call_function" or node.target not in EVALUATED:
        return None
    operands: dict[fx.Node, Any] = {operand: _evaluate(operand, evaluated) for operand in node.all_input_nodes}
    if any(value is None for value in operands.values()):
        return None
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda operand: operands[operand])
    kwargs = {name: value for name, value in kwargs.items() if name not in IGNORED_ARGUMENTS}
    try:
        result: Tensor = node.target(*args, **kwargs)  # type: ignore[operator]
    except RuntimeError:  # running the graph raises the same error: for example a remainder by zero
        return None
    traced = node.meta[VALUE]
    return result if result.dtype == traced.dtype and result.shape == traced.shape else None


def _is_view_of_arange(index: fx.Node, rows: Size, shape: tuple[Size, ...]) -> bool:
    """Return whether an index has this shape, and is a view of a vector 0, 1, ..., `rows` - 1."""
    if shape_of_node(index) != shape:
        return False
    while is_kind(index, Kind.RESHAPE) and is_tensor(index.args[0]):
        index = node_argument(index)
    return len(shape_of_node(index)) == 1 and find_repeats(index, rows) == 1


def _broadcasts_to(from_shape: tuple[Size, ...], shape: tuple[Size, ...]) -> bool:
    """Return whether a tensor of shape `from_shape` can be expanded to `shape`."""
    trailing = shape[len(shape) - len(from_shape) :]
    return len(from_shape) <= len(shape) and all(size in (1, wanted) for size, wanted in zip(from_shape, trailing, strict=True))
