"""Bodies whose stretches between the runtime's own operators are compiled by Inductor."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from streamfx.torch_private import compile_with_inductor

Compiled = Callable[..., Sequence[Any]]
_cache: dict[Hashable, Compiled] = {}


@dataclass(frozen=True)
class Step:
    """One step of a body: values read by name, values written by name, and what makes them."""

    run: Any
    args: Any
    kwargs: Any
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    kind: str

    @staticmethod
    def segment(module: fx.GraphModule, inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> Step:
        names = tuple(node.name for node in inputs)
        return Step(Segment(module), None, None, names, tuple(node.name for node in outputs), "segment")

    @staticmethod
    def single(node: fx.Node, body: fx.GraphModule) -> Step:
        inputs = tuple(source.name for source in node.all_input_nodes)
        run = body.get_submodule(node.target) if isinstance(node.target, str) else node.target
        return Step(run, node.args, node.kwargs, inputs, (node.name,), "single")

    @staticmethod
    def result(node: fx.Node) -> Step:
        inputs = tuple(source.name for source in node.all_input_nodes)
        return Step(None, node.args[0], None, inputs, (), "result")


class CompiledBody:
    """Runs steps in order, dropping each value after its last use."""

    def __init__(self, steps: Sequence[Step], placeholders: Sequence[str]) -> None:
        self.steps, self.placeholders = tuple(steps), tuple(placeholders)
        last: dict[str, int] = {}
        for position, step in enumerate(self.steps):
            for name in (*step.inputs, *step.outputs):
                last[name] = position
        self._dying = [[name for name, at in last.items() if at == position] for position in range(len(self.steps))]

    def __str__(self) -> str:
        segments = sum(step.kind == "segment" for step in self.steps)
        return f"{segments} compiled segments, {len(self.steps) - segments - 1} operators of the runtime"

    def __call__(self, *feeds: Any) -> Sequence[Any]:
        env: dict[str, Any] = dict(zip(self.placeholders, feeds, strict=True))
        del feeds
        result: Sequence[Any] = ()
        for step, dying in zip(self.steps, self._dying, strict=True):
            result = self._step(step, env)
            for name in dying:
                env.pop(name, None)
        return result

    def _step(self, step: Step, env: dict[str, Any]) -> Sequence[Any]:
        if step.kind == "segment":
            env.update(zip(step.outputs, step.run(*(env[name] for name in step.inputs)), strict=True))
            return ()
        arguments = fx.node.map_arg((step.args, step.kwargs), lambda node: env[node.name])
        if step.kind == "result":
            values: Sequence[Any] = arguments[0]
            return values
        env[step.outputs[0]] = step.run(*arguments[0], **arguments[1])
        return ()


class Segment:
    """A stretch of a body, compiled once per shape, shared by all bodies that have the same one."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self._text = structure(module.graph)

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        key = (self._text, tuple(_signature(value) for value in inputs))
        compiled = _cache.get(key)
        if compiled is None:
            compiled = _cache[key] = self._compile(inputs)
        return compiled(*(value for value in inputs if isinstance(value, Tensor)))

    def _compile(self, inputs: Sequence[Any]) -> Compiled:
        """Numbers become constants: a segment has as many compiled forms as chunks have shapes, which is two."""
        graph = fx.Graph()
        copies: dict[fx.Node, Any] = {}
        tensors = []
        for node, value in zip(self.module.graph.find_nodes(op="placeholder"), inputs, strict=True):
            is_tensor = isinstance(value, Tensor)
            copies[node] = graph.placeholder(node.name) if is_tensor else value
            tensors.extend([value] if is_tensor else [])
        for node in self.module.graph.nodes:
            if node.op == "call_function":
                copies[node] = graph.node_copy(node, lambda source: copies[source])
        results = self.module.graph.output_node().args[0]
        graph.output(tuple(copies[node] for node in results))  # type: ignore[index,union-attr]
        return compile_with_inductor(fx.GraphModule(torch.nn.Module(), graph), tensors)


def structure(graph: fx.Graph) -> str:
    """The graph as text that does not depend on names."""
    number = {node: i for i, node in enumerate(graph.nodes)}

    def written(item: Any) -> Any:
        return f"%{number[item]}" if isinstance(item, fx.Node) else item

    lines = []
    for node in graph.nodes:
        args = fx.node.map_aggregate((node.args, node.kwargs), written)
        lines.append(f"{node.op} {node.target if node.op == 'call_function' else ''} {args}")
    return "\n".join(lines)


def _signature(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return (value.dtype, tuple(value.shape), value.stride(), value.device)
    return value
