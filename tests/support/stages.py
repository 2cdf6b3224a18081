"""A decoder of a few small layers, and its compiled graph with gradients stage by stage."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from streamfx.frontend.backend import Compilation
from streamfx.options import resolve_options
from streamfx.runtime.loop import Loop
from tests.support.layouts import tokens
from tests.support.twins import same_gradients

VOCABULARY, WIDTH, LENGTH, CHUNK = 11, 8, 13, 5


class Layers(nn.Module):
    """Layers of causal attention with one head, and a head with a loss: [B, T]."""

    def __init__(self, layers: int = 2, width: int = WIDTH, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.qkv = nn.ModuleList([nn.Linear(width, 3 * width) for _ in range(layers)])
        self.out = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def first(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embed(ids)
        return x

    def hidden(self, x: Tensor) -> Tensor:
        for qkv, out in zip(self.qkv, self.out, strict=True):
            q, k, v = (part[:, None] for part in qkv(x).chunk(3, -1))
            x = x + out(F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])
        return x

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        return F.cross_entropy(self.head(self.hidden(self.first(ids))).flatten(0, 1), labels.flatten())


def batch(seed: int = 0, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    return tokens(VOCABULARY, 2, length, seed), tokens(VOCABULARY, 2, length, seed + 100)


class Staged:
    """A model, its copy that stays as it is, and the compiled graph of the model, called past Dynamo: one compilation for many
    tests. `compilation.chain` may be changed.
    """

    def __init__(self, model: nn.Module, *inputs: Any, **options: Any) -> None:
        self.model, self.eager = model.double(), copy.deepcopy(model)
        self._weights = copy.deepcopy(model.state_dict())
        asked = {"chunk_size": CHUNK, "loss_chunk_size": CHUNK, "outputs": "dense", "gradients": "stagewise", **options}
        calls: list[tuple[Compilation, Callable[..., Any], list[Any]]] = []

        def backend(module: fx.GraphModule, given: list[Any]) -> Callable[..., Any]:
            compilation = Compilation(module, resolve_options(asked))
            calls.append((compilation, compilation.compile(given), list(given)))
            return calls[-1][1]

        torch.compile(self.model, backend=backend)(*inputs)
        ((self.compilation, self._function, self._given),) = calls
        self._places = [next(i for i, one in enumerate(self._given) if one is item) for item in inputs]

    def __call__(self, *inputs: Any) -> Any:
        """The results of the graph; a result that is the only one comes alone."""
        given = list(self._given)
        for place, item in zip(self._places, inputs, strict=True):
            given[place] = item
        results = self._function(*given)
        return results[0] if len(results) == 1 else results

    @property
    def chain(self) -> Any:
        return self.compilation.chain

    def reset(self) -> None:
        """Weights as they were, no gradients."""
        for model in (self.model, self.eager):
            model.load_state_dict(self._weights)
            model.zero_grad()
        if self.chain is not None:
            self.chain.always = True

    def both(self, step: Callable[[Callable[..., Any], nn.Module], Any]) -> None:
        """Assert that a step, given a callable and its module, has eager's gradients."""
        step(self, self.model)
        step(self.eager, self.eager)
        same_gradients(self.model, self.eager)


@contextmanager
def noted_loops(into: list[str]) -> Iterator[None]:
    """Append the names of loops as they begin."""
    runner = Loop.runner  # called once per run

    def noted(self: Loop, bounds: Any) -> Any:
        into.append(self.spec.name)
        return runner(self, bounds)

    with mock.patch.object(Loop, "runner", noted):
        yield


def descend(parameter: Tensor) -> None:
    """A step of an optimizer for one parameter, whose gradient is not needed any more."""
    with torch.no_grad():
        assert parameter.grad is not None
        parameter.add_(parameter.grad, alpha=-0.1)
    parameter.grad = None


@contextmanager
def hooked(parameters: Sequence[Tensor], hook: Callable[[Tensor], None]) -> Iterator[None]:
    """A hook on parameters that is called once their gradient is complete."""
    handles = [parameter.register_post_accumulate_grad_hook(hook) for parameter in parameters]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
