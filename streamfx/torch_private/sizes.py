"""Private interfaces for sizes that are dynamic: their signs, their hints, and graphs compiled for any of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import fx

from streamfx.torch_private import Compiler, inductor_runs, no_modes

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


def size_hint(size: Any) -> int:
    """The number that a symbolic size stood for when it was traced; 1 where nobody knows (2.11, 2.13)."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    supposed = _supposed.get()
    if supposed and size.node.expr.free_symbols <= set(supposed):
        return int(size.node.expr.subs(supposed))
    hint = size.node.hint
    return int(hint) if hint is not None else 1


Shapes = Callable[[Any], list[tuple[list[Any], list[Any], torch.Tensor]]]


def compile_for_sizes(module: fx.GraphModule, like: int, shapes: Shapes) -> tuple[Callable[..., Any], Callable[[int], bool]]:
    """Let Inductor compile a graph for all sizes that follow from a number: see `with_sizes` (2.11, 2.13)."""

    def compiler(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        with inductor_runs():
            from torch._inductor import standalone_compile

            compiled: Callable[..., Any] = standalone_compile(module, inputs, dynamic_shapes="from_tracing_context", options={})
        return compiled

    return with_sizes(compiler, module, like, shapes)


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
