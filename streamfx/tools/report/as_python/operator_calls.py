"""Write an operator call as a Python expression: `x @ weight`, `x.transpose(1, 2)`, `aten.silu(x)`, `forward(query=q, ...)`."""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable
from functools import cache
from keyword import iskeyword
from typing import Any

import torch
from torch import fx

from streamfx.runtime.in_place import add_in_place, scale_in_place, scale_saved_in_place
from streamfx.tools.report.as_python.module_globals import FUNCTION_NAME, ModuleGlobals
from streamfx.torch_private import OpOverload

aten = torch.ops.aten
INFIX: dict[Any, str] = {
    **dict.fromkeys((aten.add.Tensor, aten.add.Scalar), "+"),
    **dict.fromkeys((aten.sub.Tensor, aten.sub.Scalar), "-"),
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar), "*"),
    **dict.fromkeys((aten.div.Tensor, aten.div.Scalar), "/"),
    aten.mm.default: "@",
    aten.bmm.default: "@",
    add_in_place: "+",  # the written code allocates results where the compiled step writes over an operand
    scale_in_place: "*",
    scale_saved_in_place: "*",
}
METHODS = frozenset(  # operators that are methods of tensors, with the same arguments
    ["cos", "exp", "expand", "mean", "neg", "permute", "pow", "rsqrt", "select", "sigmoid", "sin", "sqrt", "squeeze", "sum", "t"]
) | {"tanh", "transpose", "unsqueeze"}
RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
VIEWS = frozenset(
    {*RESHAPES, aten.t.default, aten.transpose.int, aten.permute.default, aten.unsqueeze.default, aten.expand.default}
)
NO_END = 2**63 - 1  # the end of a slice that has none
KEYWORDS_FROM = 3  # functions with so many arguments are called with their names
Write = Callable[[Any], str]  # an argument as an expression


def atom(text: str) -> str:
    """Return an expression in parentheses, unless nothing around it can split it.

    >>> atom("x.reshape(2, n)"), atom("x @ y.t()")
    ('x.reshape(2, n)', '(x @ y.t())')
    """
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == " " and depth == 0:
            return f"({text})"
    return text


class CallWriter:
    """Writes operator calls; `argument` writes an argument: a node as its name or expression."""

    def __init__(self, module: ModuleGlobals, argument: Write) -> None:
        self.module, self.argument = module, argument

    def expression(self, node: fx.Node) -> str:
        """Return the expression that a call computes."""
        target, args = node.target, node.args
        if target is operator.getitem:
            return f"{self.argument(args[0])}[{self.argument(args[1])}]"
        if target in INFIX and len(args) == 2 and not node.kwargs:
            return f"{atom(self.argument(args[0]))} {INFIX[target]} {atom(self.argument(args[1]))}"
        if target in RESHAPES:
            operand = re.sub(r"\.reshape\([^()]*\)$", "", self.object(args[0]))  # the last of several decides
            return f"{operand}.reshape({self._items(args[1])})"
        if target is aten.slice.Tensor and (text := self._slice(*args)):  # type: ignore[arg-type]
            return text
        if target is aten._to_copy.default and (text := self._conversion(node)):
            return text
        if isinstance(target, OpOverload) and target.overloadpacket.__name__ in METHODS and isinstance(args[0], fx.Node):
            return f"{self.object(args[0])}.{target.overloadpacket.__name__}({self._arguments(args[1:], node.kwargs)})"
        return self._call(node)

    def object(self, argument: Any) -> str:
        """Return an argument as the object of a method call."""
        return atom(self.argument(argument))

    def _items(self, sizes: Any) -> str:
        return ", ".join(map(self.argument, sizes))

    def _slice(self, operand: Any, dim: int = 0, start: Any = None, stop: Any = None, step: Any = 1) -> str:
        """Return `x[:, start:stop]`; "" for a dimension that is counted from the end."""
        if dim < 0:
            return ""
        low = "" if start in (None, 0) else self.argument(start)
        high = "" if stop is None or stop == NO_END else self.argument(stop)
        return f"{self.object(operand)}[{':, ' * dim}{low}:{high}{'' if step == 1 else f':{self.argument(step)}'}]"

    def _conversion(self, node: fx.Node) -> str:
        """Return `x.to(dtype=...)`; "" if the copy has another layout or memory format."""
        keywords = {key: value for key, value in node.kwargs.items() if value not in (None, False, torch.strided)}
        if not keywords or not keywords.keys() <= {"dtype", "device"}:
            return ""
        if set(keywords) == {"dtype"}:
            return f"{self.object(node.args[0])}.to({self.argument(keywords['dtype'])})"
        return f"{self.object(node.args[0])}.to({self._arguments((), keywords)})"

    def _call(self, node: fx.Node) -> str:
        """Return a call by the name of the function; arguments of longer calls of Python functions are named."""
        target = node.target
        names = parameters_of(target)
        args, kwargs = tuple(node.args), dict(node.kwargs)
        if len(names) >= max(KEYWORDS_FROM, len(args)):
            args, kwargs = (), {**dict(zip(names, args, strict=False)), **kwargs}
        return f"{self.module.text(target)}({self._arguments(args, kwargs)})"

    def _arguments(self, args: Any, kwargs: Any) -> str:
        """Return arguments of a call; keywords of Python among their names are passed as a dictionary."""
        named = [f"{key}={self.argument(value)}" for key, value in kwargs.items() if not iskeyword(key)]
        named += [f"**{{{key!r}: {self.argument(value)}}}" for key, value in kwargs.items() if iskeyword(key)]
        return ", ".join([*map(self.argument, args), *named])


@cache
def parameters_of(target: Any) -> tuple[str, ...]:
    """Return the names of the arguments of a Python function; none of an operator, or if some have no name."""
    if isinstance(target, OpOverload) or not inspect.isroutine(target):
        return ()
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return ()
    if any(item.kind in (item.POSITIONAL_ONLY, item.VAR_POSITIONAL, item.VAR_KEYWORD) for item in parameters):
        return ()
    return tuple(item.name for item in parameters)


def argument_text(value: Any, module: ModuleGlobals, name: Callable[[fx.Node], str]) -> str:
    """Return an argument of a call as an expression, with nodes by name also in nested collections."""
    if isinstance(value, fx.Node):
        return name(value)
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        items = ", ".join(argument_text(item, module, name) for item in value)
        return f"({items}{',' * (len(value) == 1)})" if isinstance(value, tuple) else f"[{items}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {argument_text(item, module, name)}" for key, item in value.items()) + "}"
    return module.text(value)


def graph_function(graph: fx.Graph, module: ModuleGlobals, as_mask: bool) -> str:
    """Return the text of a function `FUNCTION_NAME` that runs a graph; a mask gets four dimensions."""

    def write(value: Any) -> str:
        return argument_text(value, module, lambda node: node.name)

    calls = CallWriter(module, write)
    lines = [f"def {FUNCTION_NAME}({', '.join(node.name for node in graph.find_nodes(op='placeholder'))}):"]
    for node in graph.nodes:
        if node.op == "get_attr":
            lines.append(f"    {node.name} = {module.text(_constant_of(node))}")
        elif node.op == "call_function":
            lines.append(f"    {node.name} = {calls.expression(node)}")
    result = graph.output_node().args[0]
    if as_mask:
        mask = write(result[0])  # type: ignore[index]
        lines.append(f"    return {mask}[(None,) * (4 - {mask}.dim())]")
    else:
        lines.append(f"    return {write(result)}")
    return "\n".join(lines) + "\n"


def _constant_of(node: fx.Node) -> Any:
    owner = node.graph.owning_module
    return None if owner is None else operator.attrgetter(str(node.target))(owner)
