"""The sequence lengths for which a plan is valid. With dynamic shapes, lengths change from call to call.

A plan is chosen by numbers: kept bytes and peak bytes. Every size grows with every length, and chunks never have more
rows than in the simulation, so a plan that fits for some lengths fits for all shorter ones. So each plan comes with the
longest lengths for which it is known to be valid, and the compiled graph gets a Dynamo guard: a longer call is recompiled
and planned anew. A plan is computed for longer lengths than the call's, if one exists, so that few are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import fx

from streamfx.errors import describe_error
from streamfx.ir.sizes import Size, simplified
from streamfx.log import log
from streamfx.node_meta import EXAMPLE_VALUE, VALUE
from streamfx.torch_private.symbolic_sizes import assume_sizes, upper_bound

MAX_DOUBLINGS = 6  # a plan is tested up to 64 times the lengths
HEADROOM = (2, 1.2, 1)  # planned lengths, as multiples of the call's, in order of preference
PRECISION = 1.05  # the search for the longest lengths stops within this factor


@dataclass(frozen=True)
class Lengths:
    """A number for each symbol (dynamic size) of a graph's inputs, such as {s0: 4096}; false if no size is dynamic.

    `maximums` holds known upper bounds of the symbols: the rows of a position table, for example.
    """

    numbers: Mapping[sympy.Symbol, int]
    maximums: Mapping[sympy.Symbol, int] = field(default_factory=dict, compare=False)

    @staticmethod
    def of_current_call(graph: fx.Graph) -> Lengths:
        """Return the lengths of the call that is being compiled, with their upper bounds."""
        sizes = dynamic_sizes(graph)
        maximums = {symbol: bound for symbol, (_, size) in sizes.items() if (bound := upper_bound(size)) is not None}
        return Lengths({symbol: hint for symbol, (hint, _) in sizes.items()}, maximums)

    def __bool__(self) -> bool:
        return bool(self.numbers)

    def __str__(self) -> str:
        return ", ".join(f"{symbol} <= {number:,}" for symbol, number in self.numbers.items())

    def scaled_by(self, factor: float) -> Lengths:
        """Return these lengths times a factor, rounded down, each at most its upper bound."""
        scaled = {symbol: int(number * factor) for symbol, number in self.numbers.items()}
        return replace(
            self, numbers={symbol: min(number, self.maximums.get(symbol, number)) for symbol, number in scaled.items()}
        )

    def evaluate(self, size: Size) -> int:
        """Return the value of a size at these lengths."""
        return size if isinstance(size, int) else int(simplified(size.subs(self.numbers)))

    def assumed(self) -> Any:
        """Return a context in which sizes evaluate at these lengths instead of the call's."""
        return assume_sizes(self.numbers)

    def longest_valid(self, is_valid: Callable[[Lengths], bool], precision: float = PRECISION) -> Lengths:
        """Return the longest multiple of these lengths for which `is_valid` returns True, within a factor of `precision`.

        `is_valid` must return True for these lengths. The factor is doubled until `is_valid` returns False, then bisected.
        """
        low, high = 1.0, 2.0  # factors: valid at `low`
        while high <= 2**MAX_DOUBLINGS and self._is_valid_at(is_valid, high):
            if self.scaled_by(high) == self.scaled_by(low):
                return self.scaled_by(low)
            low, high = high, 2 * high
        while high / low > precision and high <= 2**MAX_DOUBLINGS:
            middle = (low * high) ** 0.5
            low, high = (middle, high) if self._is_valid_at(is_valid, middle) else (low, middle)
        return self.scaled_by(low)

    def longest_if_longer(self, is_valid: Callable[[Lengths], bool], precision: float = PRECISION) -> Lengths | None:
        """Return `longest_valid` if it exceeds these lengths; else None, because then each longer call would be recompiled.

        If no size is dynamic, return these lengths, which are empty.
        """
        longest_valid = self.longest_valid(is_valid, precision) if self else self
        return None if self and longest_valid == self else longest_valid

    def _is_valid_at(self, is_valid: Callable[[Lengths], bool], factor: float) -> bool:
        """Return whether `is_valid` returns True for these lengths times a factor.

        False if it raises, which is logged: the lengths may exceed a position table, for example.
        """
        longer = self.scaled_by(factor)
        with longer.assumed():
            try:
                return is_valid(longer)
            except Exception as error:
                log.info("the memory of a plan for %s is not known: %s", longer, describe_error(error))
                return False

    def with_headroom(self) -> Iterator[Lengths]:
        """Iterate over the lengths to plan for, the longest first: multiples of these (`HEADROOM`), without repetitions."""
        longer = [self.scaled_by(factor) for factor in HEADROOM]
        return (lengths for i, lengths in enumerate(longer) if lengths not in longer[:i])

    def intersection(self, other: Lengths | None) -> Lengths:
        """Return the lengths for which two plans are valid, each up to its own lengths: the shorter ones, by symbol.

        If `other` is None, return these lengths.
        """
        if other is None:
            return self
        numbers = {symbol: min(number, other.numbers.get(symbol, number)) for symbol, number in self.numbers.items()}
        return replace(self, numbers=numbers)

    def guard(self, graph: fx.Graph) -> None:
        """Add a Dynamo guard to the graph that is being compiled: a call with longer lengths recompiles it."""
        for symbol, (_, size) in dynamic_sizes(graph).items():
            if symbol in self.numbers:
                bool(size <= self.numbers[symbol])  # torch adds each comparison of a symbolic size to the guards


def dynamic_sizes(graph: fx.Graph) -> dict[sympy.Symbol, tuple[int, torch.SymInt]]:
    """Return the symbols that are sizes of a graph's inputs, each with (value at trace time, `SymInt`).

    Sizes that are expressions of symbols, such as 2 * s0, add none; neither do sizes that depend on data.
    """
    symbols: dict[sympy.Symbol, tuple[int, torch.SymInt]] = {}
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get(VALUE, node.meta.get(EXAMPLE_VALUE))  # AOTAutograd graphs, Dynamo graphs
        for size in value.shape if isinstance(value, torch.Tensor) else (value,):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and size.node.hint is not None:
                symbols.setdefault(size.node.expr, (int(size.node.hint), size))
    return symbols
