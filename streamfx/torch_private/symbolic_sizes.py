"""Private interfaces for dynamic sizes: their signs, their hints, and graphs compiled for any size.

A dynamic size is a `SymInt`, an expression in symbols such as s0; its *hint* is the value in the traced call. A comparison of
sizes adds a *guard*: a call with another outcome is retraced. "(2.11, 2.13)": the torch versions on which it was tested.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from streamfx.node_meta import VALUE
from streamfx.torch_private import Compiler, NoMaskForCudnn, fake_mode_of, no_modes

_assumed_sizes: ContextVar[Mapping[Any, int] | None] = ContextVar("streamfx_assumed_sizes", default=None)


@contextmanager
def assume_sizes(numbers: Mapping[Any, int]) -> Iterator[None]:
    """Context manager: `size_hint` uses these values of symbols instead of the traced values, in this thread or task."""
    token = _assumed_sizes.set(numbers)
    try:
        yield
    finally:
        _assumed_sizes.reset(token)


def is_negative(number: Any) -> bool | None:
    """Return whether a size is negative, which may add a guard; None if that depends on data."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # 2.11 and 2.13

    try:
        return bool(number < 0)
    except GuardOnDataDependentSymNode:
        return None


def without_guards(mode: Any) -> Any:
    """Return a context in which comparisons of sizes add no guards; `mode`: the FakeTensorMode of the sizes (2.11, 2.13)."""
    return nullcontext() if mode.shape_env is None else mode.shape_env.suppress_guards()


class _FirstProxies(dict[Any, Any]):
    """The proxy tracer's table of proxies by symbol, which keeps the first proxy of each symbol."""

    def __setitem__(self, symbol: Any, proxy: Any) -> None:
        """Store the proxy of a symbol, unless the symbol has one already."""
        super().setdefault(symbol, proxy)


class FirstProxyOfSymbol(TorchFunctionMode):
    """Trace a size that the tracer has not seen by the first proxy of its symbol (2.11, 2.13).

    The tracer looks up such a size by its symbol, and each result with that symbol replaces the proxy. The backward of
    DTensor computes `sym_max(s0, 1)`, which has the symbol `s0`: it would depend on itself, and tracing ends in a
    RecursionError. Equal symbols are equal numbers, so the first proxy, which is an input's, is right for all of them.

    The first operator of a graph changes the table of the tracer that traces it: no global is patched, and no tracer of
    another thread is affected.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch function. Before the first one, change the active tracer: it keeps the first proxy of each symbol."""
        mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
        tracer = getattr(mode, "tracer", None)
        if tracer is not None and not isinstance(tracer.sympy_expr_tracker, _FirstProxies):
            tracer.sympy_expr_tracker = _FirstProxies(tracer.sympy_expr_tracker)
        return func(*args, **(kwargs or {}))


def tracing_modes(inputs: Sequence[Any]) -> ExitStack:
    """Return a context with the modes that a trace of these inputs needs: `NoMaskForCudnn`, and `FirstProxyOfSymbol`.

    On a CPU, cuDNN does not run; without symbols, no size is dynamic. An active mode makes each access to a tensor slower
    (2.11, 2.13).
    """
    modes, fake_mode = ExitStack(), fake_mode_of(inputs)
    if any(isinstance(value, torch.Tensor) and value.device.type != "cpu" for value in inputs):
        modes.enter_context(NoMaskForCudnn())
    if fake_mode is None or (fake_mode.shape_env is not None and getattr(fake_mode.shape_env, "var_to_range", True)):
        modes.enter_context(FirstProxyOfSymbol())
    return modes


def pair_dimensions(graph: fx.Graph) -> None:
    """Guard inputs to have equal shapes, if a guard says that their numbers of elements are equal (2.11, 2.13).

    Only for inputs whose shapes are equal in the traced call. For example, torch knows of ids [b t] and labels [c u] only that
    `b * t == c * u`; this adds the guards b == c and t == u, so that a call with other shapes is retraced.
    """
    tensors = [node.meta[VALUE] for node in graph.find_nodes(op="placeholder") if isinstance(node.meta.get(VALUE), torch.Tensor)]
    dynamic_shapes = [value.shape for value in tensors if any(isinstance(size, torch.SymInt) for size in value.shape)]
    shape_env: Any = next(
        (size.node.shape_env for shape in dynamic_shapes for size in shape if isinstance(size, torch.SymInt)), None
    )
    zero_differences = {
        difference for guard in getattr(shape_env, "guards", ()) for difference in _differences(shape_env, guard.expr)
    }
    for shape_index, shape in enumerate(dynamic_shapes if zero_differences else ()):
        for other_shape in dynamic_shapes[shape_index + 1 :]:
            is_equal_now = len(shape) == len(other_shape) and all(
                map(operator.eq, map(size_hint, shape), map(size_hint, other_shape))
            )
            if is_equal_now and shape_env.replace(_product(shape) - _product(other_shape)).expand() in zero_differences:
                for size, other_size in zip(shape, other_shape, strict=True):
                    bool(size == other_size)  # the comparison adds a guard to the graph


def _differences(shape_env: Any, condition: Any) -> list[Any]:
    """Return the expressions that are zero by a guard `left == right`: left - right and its negative; [] for other guards."""
    left_product, right_product = getattr(condition, "lhs", None), getattr(condition, "rhs", None)
    if type(condition).__name__ != "Equality" or left_product is None or right_product is None:
        return []
    difference = shape_env.replace(left_product - right_product).expand()
    return [difference, -difference]


def _product(shape: torch.Size) -> Any:
    """Return the number of elements of a shape, as an expression in its symbols."""
    return math.prod(size.node.expr if isinstance(size, torch.SymInt) else size for size in shape)


def size_hint(size: Any) -> int:
    """Return the value of a size in the traced call, or under `assuming_sizes`; 1 if it depends on data (2.11, 2.13)."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    assumed = _assumed_sizes.get()
    if assumed and size.node.expr.free_symbols <= set(assumed):
        return int(size.node.expr.subs(assumed))
    hint = size.node.hint
    return int(hint) if hint is not None else 1


def upper_bound(size: torch.SymInt) -> int | None:
    """Return the largest value of a symbolic size that the guards of its graph allow; None if unknown (2.11, 2.13)."""
    value_range = size.node.shape_env.var_to_range.get(size.node.expr)
    return (
        int(value_range.upper)
        if value_range is not None and value_range.upper.is_Integer and value_range.upper < sys.maxsize - 1
        else None
    )


ShapeAndExample = tuple[list[Any], list[Any], torch.Tensor]  # (sizes, strides, a tensor of the same dtype and device)
Shapes = Callable[[Any], list[ShapeAndExample]]  # n -> the shapes of all tensors


def with_sizes(
    compiler: Compiler, module: fx.GraphModule, typical_size: int, shapes: Shapes
) -> tuple[Callable[..., Any], Callable[[int], bool]]:
    """Compile a graph whose first input is a number n, and whose tensors have sizes that are functions of n (2.11, 2.13).

    `shapes(n)` returns (sizes, strides, a tensor of the same dtype and device) of each tensor. Return the compiled function,
    called as f(n, *tensors), and a predicate: whether it holds for a number, by the guards of the trace. It is optimized
    for n = `typical_size`.
    """
    from torch._dynamo.source import ConstantSource
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    sizes = ShapeEnv()
    mode = FakeTensorMode(shape_env=sizes)
    n: Any = sizes.create_unspecified_symint_and_symbol(typical_size, ConstantSource("n"), DimDynamic.DYNAMIC)
    symbol = n.node.expr  # read it now: after compilation, it may be a number or an expression in another symbol
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
        """Return whether the compiled function holds for a number: `typical_size`, or one that all guards allow."""
        if number == typical_size or replaced:  # it holds at least for the compiled size
            return number == typical_size
        return bool(bounds.lower <= number <= bounds.upper) and all(_is_met(item, symbol, number) for item in conditions)

    return compiled, holds


def with_fixed_sizes(compiler: Compiler, module: fx.GraphModule, tensors: Sequence[ShapeAndExample]) -> Callable[..., Any]:
    """Compile a graph of tensors for fixed sizes, each given as (sizes, strides, an example) (2.11, 2.13).

    Inductor's cache key depends only on the graph and on these sizes, so that another process computes the same key.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv())
    with torch.no_grad(), no_modes():
        with mode:
            inputs = [torch.empty_strided(size, stride, dtype=x.dtype, device=x.device) for size, stride, x in tensors]
        with torch._guards.tracing(torch._guards.TracingContext(mode)):
            return compiler(module, inputs)


def _is_met(condition: Any, symbol: Any, number: int) -> bool:
    """Return whether a guard, an expression in one symbol, is true for a number; False if it cannot be evaluated."""
    try:
        return bool(condition.subs(symbol, number) == True)  # noqa: E712  (sympy's)
    except (ArithmeticError, TypeError):
        return False
