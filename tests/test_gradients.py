"""Promise one: gradients equal eager autograd's, over models, layouts, lengths and chunk sizes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import decoders, hf, layouts
from tests.support.decoders import VOCABULARY, WIDTH
from tests.support.exactness import compare
from tests.support.spread import only

pytestmark = pytest.mark.compiled

LENGTH = 13  # prime, and unlike every other size
CHUNKS = (1, 16)  # besides 7; 16 holds the whole sequence


# -- models of transformers: each plain, and in turn with each layout

PAIRS = list(product(hf.IMPLEMENTATIONS, layouts.LAYOUTS))
MODELS = [(*model, layout) for i, (model, layout) in enumerate(PAIRS) if layout == "plain" or i % 5 == 0]


@pytest.mark.parametrize(("name", "attention", "layout"), only([("gemma2", "eager", "plain")], MODELS))
def test_huggingface_models(name: str, attention: str, layout: str) -> None:
    inputs = layouts.LAYOUTS[layout](layouts.tokens(hf.VOCABULARY, 2, LENGTH))
    compare(hf.made(name, attention), inputs, also=CHUNKS, attention=hf.verdicts(name, attention, layout))


def handwritten_batch(batch: int = 2, length: int = LENGTH) -> dict[str, Tensor]:
    ids, labels = (layouts.tokens(VOCABULARY, batch, length, seed) for seed in (0, 1))
    return {"ids": ids, "labels": labels}


class Broken(decoders.Plain):
    def hidden(self, x: Tensor, **more: object) -> Tensor:
        x = x + self.attend[0](self.norms[0](x))
        torch._dynamo.graph_break()
        x = x + self.attend[1](self.norms[2](x))
        return self.norms[-1](x)


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


CAUSALLY = {"attention": {"causal"}}
ODD: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], dict[str, Any]]] = {  # a model, its inputs, what is asked of it
    # keys of another sequence, whose gradients are sums over all chunks
    "cross attention": (decoders.CrossAttention, lambda: {**handwritten_batch(), "memory": rows(2, 5, WIDTH)}, {}),
    "as many keys as rows": (decoders.CrossAttention, lambda: {**handwritten_batch(), "memory": rows(2, LENGTH, WIDTH)}, {}),
    "a bias that is learned": (
        decoders.GivenMask,
        lambda: {**handwritten_batch(), "mask": rows(1, 1, LENGTH, LENGTH)},
        {"streams": None},
    ),
    "no attention": (lambda: decoders.SwiGLU(WIDTH), lambda: (rows(2, LENGTH, WIDTH),), {}),
    "a graph break": (Broken, handwritten_batch, {"graphs": None}),
}


@pytest.mark.parametrize("name", only(["a graph break"], ODD))
def test_other_models(name: str) -> None:
    make, inputs, asked = ODD[name]
    compare(decoders.made(make), inputs(), also=CHUNKS, **asked)
