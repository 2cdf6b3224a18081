"""Bodies whose stretches between the runtime's own operators are compiled by Inductor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import fx

from streamfx.runtime.segments import Segment
from streamfx.runtime.where import name_line


@dataclass(frozen=True)
class Step:
    """One step of a body: values read by name, values written by name, what makes them, and the operators that it stands for."""

    run: Any
    args: Any
    kwargs: Any
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    kind: str
    nodes: tuple[fx.Node, ...] = ()

    @staticmethod
    def segment(module: fx.GraphModule, inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> Step:
        names = tuple(node.name for node in inputs)
        return Step(
            Segment(module), None, None, names, tuple(node.name for node in outputs), "segment", tuple(module.graph.nodes)
        )

    @staticmethod
    def single(node: fx.Node, body: fx.GraphModule) -> Step:
        inputs = tuple(source.name for source in node.all_input_nodes)
        run = body.get_submodule(node.target) if isinstance(node.target, str) else node.target
        return Step(run, node.args, node.kwargs, inputs, (node.name,), "single", (node,))

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

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledBody:
        """Copies of a loop share it: it holds nothing of a run. (AOTAutograd copies the backward half.)"""
        return self

    @property
    def segments(self) -> list[Segment]:
        return [step.run for step in self.steps if step.kind == "segment"]

    def for_chunks(self, lengths: int) -> Callable[..., Sequence[Any]]:
        """The body for a loop whose chunks have so many different lengths."""
        return partial(self, several=lengths > 1)

    def __call__(self, *feeds: Any, several: bool = False) -> Sequence[Any]:
        env: dict[str, Any] = dict(zip(self.placeholders, feeds, strict=True))
        del feeds
        result: Sequence[Any] = ()
        for step, dying in zip(self.steps, self._dying, strict=True):
            try:
                result = self._step(step, env, several)
            except Exception as error:
                name_line(error, step.nodes)
                raise
            for name in dying:
                env.pop(name, None)
        return result

    def _step(self, step: Step, env: dict[str, Any], several: bool) -> Sequence[Any]:
        if step.kind == "segment":
            env.update(zip(step.outputs, step.run(*(env[name] for name in step.inputs), several=several), strict=True))
            return ()
        arguments = fx.node.map_arg((step.args, step.kwargs), lambda node: env[node.name])
        if step.kind == "result":
            values: Sequence[Any] = arguments[0]
            return values
        env[step.outputs[0]] = step.run(*arguments[0], **arguments[1])
        return ()
