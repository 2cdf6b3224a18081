"""For which lengths does a plan hold? Those of dynamic shapes change from call to call; what fits one may not fit another.

What a plan is chosen by (bytes that are kept, peaks) is found for numbers. Every size grows with every length, and chunks never
have more rows than those that were simulated: a plan that was shown to fit for some lengths fits for all that are not longer.
So a plan comes with the longest lengths that it was shown to hold for, and the compiled graph with a guard of Dynamo's: a call
beyond them is compiled, and planned, again. It is made for longer lengths than those of the call where there is a plan for
these, so that few are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import fx

from streamfx.errors import told
from streamfx.ir.sizes import Size, simplified
from streamfx.log import log
from streamfx.node_meta import EXAMPLE_VALUE, VALUE
from streamfx.torch_private.symbolic_sizes import largest, supposing

DOUBLINGS = 6  # a plan that holds for 64 times the lengths is not asked for more
HEADROOM = (2, 1.2, 1)  # how much longer the lengths are that a plan is made for, if there is one for these
CLOSE = 1.05  # how near to the longest lengths a search for them comes


@dataclass(frozen=True)
class Lengths:
    """A number for each symbol of a graph's sizes; `now` are those of the call that it is compiled for. The graph is for none
    above `most`, where that is known: a table of positions has so many rows.
    """

    numbers: Mapping[sympy.Symbol, int]
    most: Mapping[sympy.Symbol, int] = field(default_factory=dict, compare=False)

    @staticmethod
    def now(graph: fx.Graph) -> Lengths:
        sizes = dynamic_sizes(graph)
        most = {symbol: bound for symbol, (_, size) in sizes.items() if (bound := largest(size)) is not None}
        return Lengths({symbol: hint for symbol, (hint, _) in sizes.items()}, most)

    def __bool__(self) -> bool:
        return bool(self.numbers)

    def __str__(self) -> str:
        return ", ".join(f"{symbol} <= {number:,}" for symbol, number in self.numbers.items())

    def times(self, factor: float) -> Lengths:
        longer = {symbol: int(number * factor) for symbol, number in self.numbers.items()}
        return replace(self, numbers={symbol: min(number, self.most.get(symbol, number)) for symbol, number in longer.items()})

    def number(self, size: Size) -> int:
        """A size for these lengths."""
        return size if isinstance(size, int) else int(simplified(size.subs(self.numbers)))

    def supposed(self) -> Any:
        """A context in which sizes are taken to be those for these lengths, rather than for the call's."""
        return supposing(self.numbers)

    def furthest(self, holds: Callable[[Lengths], bool], close: float = CLOSE) -> Lengths:
        """The longest multiple that something holds for, which holds for these; found as closely as asked for."""
        low, high = 1.0, 2.0
        while high <= 2**DOUBLINGS and self._supposed_to_hold(holds, high):
            if self.times(high) == self.times(low):
                return self.times(low)
            low, high = high, 2 * high
        while high / low > close and high <= 2**DOUBLINGS:
            middle = (low * high) ** 0.5
            low, high = (middle, high) if self._supposed_to_hold(holds, middle) else (low, middle)
        return self.times(low)

    def furthest_beyond(self, holds: Callable[[Lengths], bool], close: float = CLOSE) -> Lengths | None:
        """The same, empty where there are no lengths that change; None where it holds for these alone: each longer call would be
        compiled again.
        """
        furthest = self.furthest(holds, close) if self else self
        return None if self and furthest == self else furthest

    def _supposed_to_hold(self, holds: Callable[[Lengths], bool], factor: float) -> bool:
        """Not for lengths that the graph is not for, with which it cannot be followed: beyond a table of positions, say."""
        longer = self.times(factor)
        with longer.supposed():
            try:
                return holds(longer)
            except Exception as error:
                log.info("it is not known what a plan takes for %s: %s", longer, told(error))
                return False

    def with_headroom(self) -> Iterator[Lengths]:
        """These and longer ones, the longest first."""
        longer = [self.times(factor) for factor in HEADROOM]
        return (lengths for i, lengths in enumerate(longer) if lengths not in longer[:i])

    def joined(self, other: Lengths | None) -> Lengths:
        """The lengths that two plans hold for that are parts of one."""
        if other is None:
            return self
        least = {symbol: min(number, other.numbers.get(symbol, number)) for symbol, number in self.numbers.items()}
        return replace(self, numbers=least)

    def guard(self, graph: fx.Graph) -> None:
        """Let what is being compiled hold for these lengths and shorter ones alone: Dynamo compiles a call beyond anew."""
        for symbol, (_, size) in dynamic_sizes(graph).items():
            if symbol in self.numbers:
                bool(size <= self.numbers[symbol])  # torch notes what it was asked, as a guard of the graph


def dynamic_sizes(graph: fx.Graph) -> dict[sympy.Symbol, tuple[int, torch.SymInt]]:
    """The symbols that a graph's inputs have for sizes, the number of each when it was traced, and the size."""
    found: dict[sympy.Symbol, tuple[int, torch.SymInt]] = {}
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get(VALUE, node.meta.get(EXAMPLE_VALUE))  # AOTAutograd's graphs, and Dynamo's
        for size in value.shape if isinstance(value, torch.Tensor) else (value,):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and size.node.hint is not None:
                found.setdefault(size.node.expr, (int(size.node.hint), size))
    return found
