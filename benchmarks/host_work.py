"""What the host does beside operators: a step's loops on tensors so small that nothing else takes time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from streamfx.passes.lowering.compile_bodies import split
from streamfx.runtime.compiled import CompiledBody
from streamfx.runtime.loop import Loop
from streamfx.runtime.outer import HostProgram

Feeds = Sequence[Any]


@dataclass(frozen=True)
class Run:
    """A loop of a step, what it was given, and what its body was fed for each chunk."""

    loop: Loop
    arguments: tuple[Any, ...]
    feeds: Sequence[Feeds]

    @property
    def operators(self) -> int:
        return sum(node.op in ("call_function", "call_module") for node in self.loop.spec.body.graph.nodes)

    def ways(self) -> dict[str, Callable[[], Any]]:
        """Ways of running it: the whole loop, and its body for each chunk; `plain` is the code that torch.fx writes."""
        body = self.loop.spec.body
        outer, compiled = HostProgram(body), CompiledBody(split(self.loop.spec), body).for_chunks(1)
        return {
            "loop": lambda: self.loop.forward(*self.arguments),
            "plain": lambda: self._each(body.forward),
            "outer": lambda: self._each(lambda *own: outer.run(list(own))),
            "compiled": lambda: self._each(compiled),
        }

    def _each(self, run: Callable[..., Any]) -> None:
        for own in self.feeds:
            run(*own)


class _Watched(Loop):
    """Notes down what its body is fed."""

    def __init__(self, loop: Loop) -> None:
        super().__init__(loop.spec)
        self.fed: list[Feeds] = []

    def runner(self, bounds: Sequence[tuple[int, int]]) -> Callable[..., Sequence[Any]]:
        run = super().runner(bounds)

        def watched(*own: Any) -> Sequence[Any]:
            self.fed.append(own)
            return run(*own)

        return watched


def runs_of(step: Callable[[], object]) -> list[Run]:
    """The loops of a step, forward and backward; it is compiled meanwhile."""
    seen: dict[str, tuple[Loop, tuple[Any, ...]]] = {}
    forward = Loop.forward

    def watched(self: Loop, *arguments: Any) -> Any:
        if type(self) is Loop:
            seen[self.spec.name] = self, tuple(item.clone() if isinstance(item, Tensor) else item for item in arguments)
        return forward(self, *arguments)

    with mock.patch.object(Loop, "forward", watched):
        step()
    found = []
    for loop, arguments in seen.values():
        once = _Watched(loop)
        with torch.no_grad():
            once(*arguments)
        found.append(Run(loop, arguments, once.fed))
    return found


@contextmanager
def uncompiled_stretches() -> Iterator[None]:
    """The code that torch.fx writes in the place of Inductor's: the same operators on both sides."""
    one, several = (
        "streamfx.runtime.compiled_segments.compile_for_one_size",
        "streamfx.runtime.compiled_segments.compile_for_sizes",
    )
    with (
        mock.patch(one, lambda module, inputs: module),
        mock.patch(several, lambda module, like, shapes: (module, lambda n: True)),
        mock.patch("streamfx.runtime.compiled_segments._versions", {}),
    ):
        yield


def seconds(ways: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Processor seconds of each way in each round."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    with torch.no_grad(), uncompiled_stretches():
        for number in range(rounds + 1):
            for name, run in ways.items():
                start = time.thread_time()
                run()
                if number:  # in the first round code is written
                    found[name].append(time.thread_time() - start)
    return found
