"""Sizes that differ between calls: generalize from two calls of different length to all lengths.

The sizes and strides of all inputs of a call form a tuple of numbers. If two calls differ by the length n of a chunk,
each number is slope * n + offset: (2, 128, 256) and (2, 116, 232) are (2, n, 2 * n). This is a family, for which code is
compiled once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

Numbers = tuple[int, ...]


@dataclass(frozen=True)
class Family:
    """Tuples of numbers of the form slope * n + offset, where n is the number at index `at`; if `at` is None, a single tuple."""

    slopes: Numbers
    offsets: Numbers
    at: int | None

    def member(self, numbers: Numbers) -> int | None:
        """Return the n with which a tuple is a member, 0 if the family has no n, None if it is not a member."""
        n = 0 if self.at is None else numbers[self.at]
        is_member = all(
            slope * n + offset == number for slope, offset, number in zip(self.slopes, self.offsets, numbers, strict=True)
        )
        return n if is_member else None


@dataclass(frozen=True)
class FamilyCode:
    """Code for inputs whose sizes belong to a family, with an n for which `holds` is true."""

    family: Family
    run: Callable[..., Any]
    holds: Callable[[int], bool]

    def fits(self, numbers: Numbers) -> bool:
        """Return whether the code is valid for inputs with these sizes and strides: in the family, and the guards hold."""
        n = self.family.member(numbers)
        return n is not None and (self.family.at is None or self.holds(n))

    def call(self, numbers: Numbers, inputs: Sequence[Any]) -> Any:
        """Run the code on the tensors among the inputs, with n as the first argument if the family has one."""
        tensors = (value for value in inputs if isinstance(value, Tensor))
        return self.run(*tensors) if self.family.at is None else self.run(numbers[self.family.at], *tensors)

    def bound(self, numbers: Numbers, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Return a function of a call's inputs, for inputs with the layout of `inputs`; `numbers` are its sizes and strides.

        It gives the code n and only the tensors, and makes rows contiguous where this layout needs it.
        """
        run = self.run.forward if isinstance(self.run, fx.GraphModule) else self.run
        if self.family.at is not None:
            run = partial(run, numbers[self.family.at])
        tensors = [i for i, value in enumerate(inputs) if isinstance(value, Tensor)]
        repacked = {i for i in tensors if with_contiguous_rows(inputs[i]) is not inputs[i]}
        if len(tensors) == len(inputs) and not repacked:
            return run
        return lambda *arguments: run(*[arguments[i].contiguous() if i in repacked else arguments[i] for i in tensors])


def find_code(codes: Sequence[FamilyCode], numbers: Numbers) -> FamilyCode | None:
    """Return the first code that is valid for these sizes and strides, or None."""
    return next((code for code in codes if code.fits(numbers)), None)


def any_size(n: int) -> bool:
    """Return True: the guard of code that is valid for every n."""
    return True


def single_member(numbers: Numbers) -> Family:
    """Return the family that contains only these numbers."""
    return Family((0,) * len(numbers), numbers, None)


def family_of(first: Numbers, second: Numbers) -> Family | None:
    """Return the family that contains both tuples, or None: n is the number that differs least.

    >>> family_of((2, 128, 256), (2, 116, 232))
    Family(slopes=(0, 1, 2), offsets=(2, 0, 0), at=1)
    >>> family_of((128, 7), (116, 4)), family_of((1, 8), (2, 4))
    (Family(slopes=(4, 1), offsets=(100, 0), at=1), None)
    """
    steps = [a - b for a, b in zip(first, second, strict=True)]
    varying = [i for i, step in enumerate(steps) if step]
    varying_index = min(varying, key=lambda i: abs(steps[i]), default=None)
    if varying_index is None:
        return single_member(first)
    if any(steps[i] % steps[varying_index] for i in varying) or min(first[varying_index], second[varying_index]) < 2:
        return None
    slopes = tuple(step // steps[varying_index] for step in steps)
    return Family(slopes, tuple(a - slope * first[varying_index] for a, slope in zip(first, slopes, strict=True)), varying_index)


def widened_family(codes: Sequence[FamilyCode], numbers: Numbers) -> Family:
    """Return a family of `numbers` and the tuple of a code for a single tuple; without such a code, of `numbers` alone."""
    families = (family_of(code.family.offsets, numbers) for code in codes if code.family.at is None)
    return next((family for family in families if family is not None), single_member(numbers))


def layout_of(inputs: Sequence[Any]) -> tuple[tuple[Any, ...], Numbers]:
    """Return (kinds, numbers): the properties that must be equal to share code, and the sizes and strides in one tuple.

    Kinds are dtypes, devices and ranks. Numbers may vary within a family; inputs that are numbers are among them.
    The stride of a dimension of size 1 has no meaning; it is replaced by the stride of a contiguous tensor.
    """
    kinds: list[Any] = []
    numbers: list[int] = []
    for value in inputs:
        if isinstance(value, Tensor):
            kinds.append((value.dtype, value.device, value.dim()))
            numbers += value.shape
            numbers += strides_of(value)
        else:
            kinds.append("number")
            numbers.append(value)
    return tuple(kinds), tuple(numbers)


def with_contiguous_rows(value: Any) -> Any:
    """Return a contiguous copy of a slice of a chunk's rows of several batch items, so that code can be shared.

    The slice's batch stride depends on the length of the sequence, the copy's only on the chunk. Return other values unchanged.
    """
    if not isinstance(value, Tensor) or value.dim() < 2 + value.is_floating_point() or value.is_contiguous():
        return value
    return value.contiguous() if value.stride(0) and value[0].is_contiguous() else value


def strides_of(value: Tensor) -> list[int]:
    """Return the strides; a dimension of size 1, whose stride has no meaning, gets the stride of a contiguous tensor."""
    strides = list(value.stride())
    contiguous = 1
    for dim in range(value.dim() - 1, -1, -1):
        if value.shape[dim] == 1:
            strides[dim] = contiguous
        contiguous = strides[dim] * value.shape[dim]
    return strides


def shapes_for(family: Family, n: Any, inputs: Sequence[Any]) -> list[tuple[list[Any], list[Any], Tensor]]:
    """Return (shape, strides, the tensor) of each tensor among the inputs, for an n of the family, a number or a symbol."""
    numbers = iter([slope * n + offset if slope else offset for slope, offset in zip(family.slopes, family.offsets, strict=True)])
    shapes = []
    for value in inputs:
        if isinstance(value, Tensor):
            shapes.append(([next(numbers) for _ in value.shape], [next(numbers) for _ in value.shape], value))
        else:
            next(numbers)
    return shapes


def graph_for(module: fx.GraphModule, family: Family, inputs: Sequence[Any]) -> fx.GraphModule:
    """Return the graph as a function of n and of its inputs that are tensors; without n if the family has none.

    The graph's inputs that are numbers are computed from n, or are constants, as the family says.
    """
    graph = fx.Graph()
    n = None if family.at is None else graph.placeholder("n")
    copies: dict[fx.Node, Any] = {}
    index = 0
    for node, value in zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True):
        if isinstance(value, Tensor):
            copies[node], index = graph.placeholder(node.name), index + 2 * value.dim()
            continue
        slope, copies[node], index = family.slopes[index], family.offsets[index], index + 1
        if slope:
            product = graph.call_function(operator.mul, (n, slope))
            copies[node] = graph.call_function(operator.add, (product, copies[node]))
    for node in module.graph.nodes:
        if node.op in ("call_function", "call_method"):
            copies[node] = graph.node_copy(node, lambda source: copies[source])
    results = module.graph.output_node().args[0]
    graph.output(tuple(copies[node] for node in results))  # type: ignore[index,union-attr]
    return fx.GraphModule(torch.nn.Module(), graph)
