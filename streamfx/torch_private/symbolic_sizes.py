"""Private interfaces for sizes that are dynamic: their signs, their hints, and graphs compiled for any of them."""

from __future__ import annotations

import functools
import math
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from streamfx.node_meta import VALUE
from streamfx.torch_private import Compiler, no_modes

_supposed: ContextVar[Mapping[Any, int] | None] = ContextVar("streamfx_supposed", default=None)


@contextmanager
def supposing(numbers: Mapping[Any, int]) -> Iterator[None]:
    """Inside of it `size_hint` takes these numbers for symbols, rather than those of the trace."""
    token = _supposed.set(numbers)
    try:
        yield
    finally:
        _supposed.reset(token)


def is_negative(number: Any) -> bool | None:
    """Whether a size is below zero; what that takes of a dynamic one becomes a guard. None where it depends on data."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # 2.11 and 2.13

    try:
        return bool(number < 0)
    except GuardOnDataDependentSymNode:
        return None


def without_guards(mode: Any) -> Any:
    """A context in which nothing that is asked of sizes becomes a guard (2.11, 2.13)."""
    return nullcontext() if mode.shape_env is None else mode.shape_env.suppress_guards()


class _FirstProxies(dict[Any, Any]):
    """A proxy for each symbol: the first one stays."""

    def __setitem__(self, symbol: Any, proxy: Any) -> None:
        super().setdefault(symbol, proxy)


class FirstProxyOfSymbol(TorchFunctionMode):
    """Trace a size that the tracer has not seen by the first proxy of its symbol (2.11, 2.13).

    The tracer looks such a size up by its symbol, and each result with that symbol replaces the proxy. DTensor's backward pass
    asks for `sym_max(s0, 1)`, which has the symbol `s0`: it is then computed from itself, and tracing ends in a RecursionError.
    Equal symbols are equal numbers, so the first proxy, which is an input's, is right for all.

    The first operator of a graph changes the table of the tracer that traces it: no global is patched, and no other thread's
    tracer is touched.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
        tracer = getattr(mode, "tracer", None)
        if tracer is not None and not isinstance(tracer.sympy_expr_tracker, _FirstProxies):
            tracer.sympy_expr_tracker = _FirstProxies(tracer.sympy_expr_tracker)
        return func(*args, **(kwargs or {}))


def pair_dimensions(graph: fx.Graph) -> None:
    """Let inputs that have as many elements by a guard, and the same sizes in this call, have the same sizes in all calls that a
    graph is for: ids and labels, of which torch knows that `b * t == c * u` (2.11, 2.13). A call with others is traced again.
    """
    given = [node.meta[VALUE] for node in graph.find_nodes(op="placeholder") if isinstance(node.meta.get(VALUE), torch.Tensor)]
    dynamic = [value.shape for value in given if any(isinstance(size, torch.SymInt) for size in value.shape)]
    sizes: Any = next((size.node.shape_env for shape in dynamic for size in shape if isinstance(size, torch.SymInt)), None)
    products = {difference for guard in getattr(sizes, "guards", ()) for difference in _differences(sizes, guard.expr)}
    for position, one in enumerate(dynamic if products else ()):
        for other in dynamic[position + 1 :]:
            is_alike = len(one) == len(other) and all(map(operator.eq, map(size_hint, one), map(size_hint, other)))
            if is_alike and sizes.replace(_product(one) - _product(other)).expand() in products:
                for size, same in zip(one, other, strict=True):
                    bool(size == same)  # torch notes what it was asked, as a guard of the graph


def _differences(sizes: Any, condition: Any) -> list[Any]:
    """What a guard that two products are equal says is zero."""
    left, right = getattr(condition, "lhs", None), getattr(condition, "rhs", None)
    if type(condition).__name__ != "Equality" or left is None or right is None:
        return []
    difference = sizes.replace(left - right).expand()
    return [difference, -difference]


def _product(shape: torch.Size) -> Any:
    """The number of elements as an expression."""
    return math.prod(size.node.expr if isinstance(size, torch.SymInt) else size for size in shape)


def size_hint(size: Any) -> int:
    """The number that a symbolic size stood for when it was traced; 1 where nobody knows (2.11, 2.13)."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    supposed = _supposed.get()
    if supposed and size.node.expr.free_symbols <= set(supposed):
        return int(size.node.expr.subs(supposed))
    hint = size.node.hint
    return int(hint) if hint is not None else 1


def largest(size: torch.SymInt) -> int | None:
    """The largest number that a symbolic size may be by the guards of its graph; None where none is known (2.11, 2.13)."""
    known = size.node.shape_env.var_to_range.get(size.node.expr)
    return int(known.upper) if known is not None and known.upper.is_Integer and known.upper < sys.maxsize - 1 else None


Shapes = Callable[[Any], list[tuple[list[Any], list[Any], torch.Tensor]]]


def with_sizes(
    compiler: Compiler, module: fx.GraphModule, like: int, shapes: Shapes
) -> tuple[Callable[..., Any], Callable[[int], bool]]:
    """Compile a graph whose first input is a number n and whose tensors have sizes that follow from it (2.11, 2.13).

    `shapes(n)` gives sizes and strides of each, with a tensor of its type. Returns the compiled function, called as
    f(n, *tensors), and which n it holds for; it is made with the number `like` in mind.
    """
    from torch._dynamo.source import ConstantSource
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    sizes = ShapeEnv()
    mode = FakeTensorMode(shape_env=sizes)
    n: Any = sizes.create_unspecified_symint_and_symbol(like, ConstantSource("n"), DimDynamic.DYNAMIC)
    symbol = n.node.expr  # now: once it is compiled, this may be a number, or an expression in another symbol
    with torch.no_grad(), no_modes():
        with mode:
            tensors = [
                torch.empty_strided(size, stride, dtype=value.dtype, device=value.device) for size, stride, value in shapes(n)
            ]
        with torch._guards.tracing(torch._guards.TracingContext(mode)):
            compiled = compiler(module, [n, *tensors])
    conditions = [guard.expr for guard in sizes.guards]
    replaced, bounds = symbol in sizes.replacements, sizes.var_to_range[symbol]

    @functools.cache
    def holds(number: int) -> bool:
        if number == like or replaced:  # what it was compiled for, at least
            return number == like
        return bool(bounds.lower <= number <= bounds.upper) and all(_is_met(item, symbol, number) for item in conditions)

    return compiled, holds


def _is_met(condition: Any, symbol: Any, number: int) -> bool:
    """Whether a guard allows a number; what cannot be told is not met."""
    try:
        return bool(condition.subs(symbol, number) == True)  # noqa: E712  (sympy's)
    except (ArithmeticError, TypeError):
        return False
