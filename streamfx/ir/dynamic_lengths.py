"""The sequence lengths for which a plan holds. With dynamic shapes, lengths change from call to call.

A plan is chosen by numbers: kept bytes and peak bytes. Every size grows with every length, and chunks never have more
rows than in the simulation, so a plan that fits for some lengths fits for all shorter ones. A plan therefore comes with
the longest lengths for which it was shown to hold, and the compiled graph gets a Dynamo guard: a longer call is recompiled
and replanned. To need few plans, a plan is computed for longer lengths than the call's if one exists for them.
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
from streamfx.torch_private.symbolic_sizes import largest, supposing

DOUBLINGS = 6  # a plan is tested up to 64 times the lengths
HEADROOM = (2, 1.2, 1)  # factors by which the planned lengths may exceed the call's, in the order of preference
CLOSE = 1.05  # relative precision of the search for the longest lengths


@dataclass(frozen=True)
class Lengths:
    """A number for each symbol in a graph's sizes; `now` returns the numbers of the call that is being compiled.

    The graph accepts no length above `most`, if it is known: a position table has that many rows, for example.
    """

    numbers: Mapping[sympy.Symbol, int]
    most: Mapping[sympy.Symbol, int] = field(default_factory=dict, compare=False)

    @staticmethod
    def now(graph: fx.Graph) -> Lengths:
        """Return the lengths of the call that is being compiled, with their upper bounds."""
        sizes = dynamic_sizes(graph)
        most = {symbol: bound for symbol, (_, size) in sizes.items() if (bound := largest(size)) is not None}
        return Lengths({symbol: hint for symbol, (hint, _) in sizes.items()}, most)

    def __bool__(self) -> bool:
        return bool(self.numbers)

    def __str__(self) -> str:
        return ", ".join(f"{symbol} <= {number:,}" for symbol, number in self.numbers.items())

    def times(self, factor: float) -> Lengths:
        """Return these lengths times a factor, each at most its upper bound."""
        scaled = {symbol: int(number * factor) for symbol, number in self.numbers.items()}
        return replace(self, numbers={symbol: min(number, self.most.get(symbol, number)) for symbol, number in scaled.items()})

    def number(self, size: Size) -> int:
        """Return the value of a size at these lengths."""
        return size if isinstance(size, int) else int(simplified(size.subs(self.numbers)))

    def supposed(self) -> Any:
        """Return a context in which sizes evaluate at these lengths instead of the call's."""
        return supposing(self.numbers)

    def furthest(self, holds: Callable[[Lengths], bool], close: float = CLOSE) -> Lengths:
        """Return the longest multiple of these lengths, within a factor of `close`, for which `holds` is true, as for these."""
        low, high = 1.0, 2.0
        while high <= 2**DOUBLINGS and self._holds_at(holds, high):
            if self.times(high) == self.times(low):
                return self.times(low)
            low, high = high, 2 * high
        while high / low > close and high <= 2**DOUBLINGS:
            middle = (low * high) ** 0.5
            low, high = (middle, high) if self._holds_at(holds, middle) else (low, middle)
        return self.times(low)

    def furthest_beyond(self, holds: Callable[[Lengths], bool], close: float = CLOSE) -> Lengths | None:
        """Return the same, empty if no length is dynamic; None if it holds for these lengths only.

        In the latter case, each longer call would be recompiled.
        """
        furthest = self.furthest(holds, close) if self else self
        return None if self and furthest == self else furthest

    def _holds_at(self, holds: Callable[[Lengths], bool], factor: float) -> bool:
        """Return whether `holds` is true at longer lengths; False if the graph cannot be traced at them.

        They may exceed a position table, for example.
        """
        longer = self.times(factor)
        with longer.supposed():
            try:
                return holds(longer)
            except Exception as error:
                log.info("it is not known what a plan takes for %s: %s", longer, describe_error(error))
                return False

    def with_headroom(self) -> Iterator[Lengths]:
        """Iterate over these lengths and longer ones, the longest first."""
        longer = [self.times(factor) for factor in HEADROOM]
        return (lengths for i, lengths in enumerate(longer) if lengths not in longer[:i])

    def joined(self, other: Lengths | None) -> Lengths:
        """Return the lengths for which two plans both hold: the shorter of each."""
        if other is None:
            return self
        least = {symbol: min(number, other.numbers.get(symbol, number)) for symbol, number in self.numbers.items()}
        return replace(self, numbers=least)

    def guard(self, graph: fx.Graph) -> None:
        """Guard the graph that is being compiled to these lengths and shorter ones; Dynamo recompiles for a longer call."""
        for symbol, (_, size) in dynamic_sizes(graph).items():
            if symbol in self.numbers:
                bool(size <= self.numbers[symbol])  # torch notes what it was asked, as a guard of the graph


def dynamic_sizes(graph: fx.Graph) -> dict[sympy.Symbol, tuple[int, torch.SymInt]]:
    """Return the symbols in the sizes of a graph's inputs, each with its value at trace time and its `SymInt`."""
    symbols: dict[sympy.Symbol, tuple[int, torch.SymInt]] = {}
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get(VALUE, node.meta.get(EXAMPLE_VALUE))  # AOTAutograd graphs, Dynamo graphs
        for size in value.shape if isinstance(value, torch.Tensor) else (value,):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and size.node.hint is not None:
                symbols.setdefault(size.node.expr, (int(size.node.hint), size))
    return symbols
