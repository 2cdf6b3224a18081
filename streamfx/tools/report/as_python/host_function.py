"""Write a host program, the graph that calls the loops, as a Python function."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from streamfx.ir.joint import is_tensor, outputs_of
from streamfx.node_meta import CONSTANT, JOINT
from streamfx.runtime.loop import Loop
from streamfx.runtime.runtime_sizes import SizeOf, SizePrinter, kind_of_size
from streamfx.tools.report.as_python.identifiers import Identifiers
from streamfx.tools.report.as_python.module_globals import ModuleGlobals
from streamfx.tools.report.as_python.operator_calls import VIEWS, CallWriter, argument_text

aten = torch.ops.aten


class HostFunctionWriter:
    """Writes one host program.

    `loop_names`: the function of each loop that is written. `names`: of inputs, and of values that both host programs have,
    which this writer adds to; `hints`: names for other values.
    """

    def __init__(
        self,
        host: fx.GraphModule,
        loop_names: Mapping[int, str],
        names: Mapping[fx.Node, str],
        hints: Mapping[fx.Node, str],
        module: ModuleGlobals,
        saved: Collection[fx.Node] = (),
    ) -> None:
        self.host, self.loop_names, self.hints, self.module = host, loop_names, hints, module
        self.identifiers = Identifiers((*module.names_in_use, *names.values()))
        self.expressions: dict[fx.Node, str] = dict(names)
        self.calls = CallWriter(module, self.text)
        self.saved = saved

    def text(self, value: Any) -> str:
        """Return a value, or a constant, as an expression."""
        return argument_text(value, self.module, self.expressions.__getitem__)

    def lines(self, write_return: Callable[[HostFunctionWriter, Sequence[Any]], Iterator[str]]) -> list[str]:
        """Return the lines of the function's body; `write_return` yields the last ones, given the results."""
        lines: list[str] = []
        for node in self.host.graph.nodes:
            if node.op == "call_module":
                lines += self._call_of_module(node)
            elif node.op == "get_attr":
                lines.append(f"{self._new(node)} = {self.module.text(self._constant(node))}")
            elif node.op == "call_function" and node not in self.expressions:
                lines += self._call(node)
        return [*lines, *write_return(self, outputs_of(self.host.graph))]

    def _new(self, node: fx.Node) -> str:
        """Return a new name for a value, which the next lines use."""
        self.expressions[node] = name = self.identifiers.new(self.hints.get(node) or str(node.meta.get(JOINT) or node.name))
        return name

    def _call(self, node: fx.Node) -> list[str]:
        """Return the line of an operator; a view that is used once is written where it is used, unless it is saved."""
        if node.target in VIEWS and len(node.users) == 1 and node not in self.saved:
            self.expressions[node] = self.calls.expression(node)
            return []
        text = self.calls.expression(node)
        return [f"{self._new(node)} = {text}" if node.users else text]

    def _call_of_module(self, node: fx.Node) -> list[str]:
        """Return the lines of a call of a loop, whose results get names, or of a size that is computed from others."""
        called = self.host.get_submodule(str(node.target))
        if isinstance(called, SizeOf):
            symbols = dict(zip(called.names, map(self.text, node.args), strict=True))
            return [f"{self._new(node)} = {self._size(called.expression, symbols)}"]
        arguments = ", ".join(map(self.text, node.args))
        if not isinstance(called, Loop):
            return [f"{self._new(node)} = {self.module.text(called)}({arguments})"]
        name = self.loop_names.get(id(called), "")
        results: dict[Any, str] = {}  # names, by index of the result
        for user in node.users:
            results[user.args[1]] = self.expressions[user] = results.get(user.args[1]) or self._new(user)
        targets = [results.get(i, "_") for i in range(len(called.spec.yields))]
        return [f"{', '.join(targets)} = {name}({arguments})" if targets else f"{name}({arguments})"]

    def _size(self, size: Any, symbols: Mapping[str, str]) -> str:
        """Return a size as an expression of other sizes, whose names are given by symbol."""
        text = re.sub(
            r"\b[a-zA-Z_]\w*\b", lambda found: symbols.get(found[0], found[0]), SizePrinter().doprint(sympy.sympify(size))
        )
        return f"{kind_of_size(size).__name__}({self.module.sizes(text)})"  # type: ignore[attr-defined]

    def _constant(self, node: fx.Node) -> Any:
        """Return the object that a `get_attr` node reads."""
        constant = node.meta.get(CONSTANT)
        return operator.attrgetter(str(node.target))(self.host) if constant is None else constant


def gradient_hints(gradients: Mapping[str, Any], saved: Mapping[fx.Node, Any]) -> dict[fx.Node, str]:
    """Return, for results of loops from which a gradient is computed by operators between loops, `grad_` and the input's name.

    `gradients`: by input, the gradient in the backward host program. `saved`: for inputs of that program, the forward values.
    """
    hints: dict[fx.Node, str] = {}
    for name, gradient in gradients.items():
        todo = [gradient]
        while todo:
            node = todo.pop()
            if not isinstance(node, fx.Node) or node in hints:
                continue
            producer = node.args[0] if node.target is operator.getitem else node
            if isinstance(producer, fx.Node) and producer.op == "call_module":
                hints[node] = f"grad_{name}"
            elif node in saved:
                todo.append(saved[node])
            elif node.op == "call_function":
                todo.extend(operand for operand in node.all_input_nodes if is_tensor(operand))
    return hints
