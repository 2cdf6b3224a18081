"""Promise one: gradients equal eager autograd's, over models, layouts, lengths and chunk sizes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import decoders, hf, layouts
from tests.support.decoders import CAUSAL, OPEN, VOCABULARY, WIDTH, WINDOWED
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


# -- decoders in other styles


def handwritten_batch(batch: int = 2, length: int = LENGTH) -> dict[str, Tensor]:
    ids, labels = (layouts.tokens(VOCABULARY, batch, length, seed) for seed in (0, 1))
    return {"ids": ids, "labels": labels}


HANDWRITTEN = {**CAUSAL, **WINDOWED, **OPEN}
SIZES = [  # of chunks, batches and sequences; the first is unlike the others
    (7, 2, LENGTH),
    (3, 2, 23),
    (4, 7, 7),
    (4, 2, decoders.HEAD),
    (5, 2, WIDTH),
    (4, 3, decoders.HEADS),
    (3, 2, VOCABULARY),
    (4, 1, VOCABULARY),
    (1, 1, 5),
    (10, 2, 11),
    (4, 1, 31),
]
STYLES = [(name, size) for i, (name, size) in enumerate(product(HANDWRITTEN, SIZES)) if size == SIZES[0] or i % 3 == 0]


@pytest.mark.parametrize(("name", "size"), only([("einsum", SIZES[0]), ("additive_triangle", SIZES[0])], STYLES))
def test_handwritten_decoders(name: str, size: tuple[int, int, int]) -> None:
    """Where attention has no mask, queries stream over all keys, whose gradients are complete only behind a barrier."""
    chunk_size, batch, length = size
    found = {"causal"} if name in CAUSAL else {"masked"} if name in OPEN else {f"window({decoders.WindowHeads.window})"}
    inputs, attention = handwritten_batch(batch, length), None if name in WINDOWED and length <= LENGTH else found
    streams = None if length <= 2 else True
    compare(decoders.made(HANDWRITTEN[name]), inputs, chunk_size=chunk_size, also=CHUNKS, attention=attention, streams=streams)


class Broken(decoders.Plain):
    def hidden(self, x: Tensor, **more: object) -> Tensor:
        x = x + self.attend[0](self.norms[0](x))
        torch._dynamo.graph_break()
        x = x + self.attend[1](self.norms[2](x))
        return self.norms[-1](x)


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def time_first(*size: int) -> dict[str, Tensor]:
    return {name: value.T.contiguous() for name, value in handwritten_batch(*size).items()}


def targets() -> dict[str, Tensor]:
    ids = layouts.tokens(VOCABULARY, 2, LENGTH)
    return {"ids": ids, "targets": ids.masked_fill(torch.arange(LENGTH) // 3 == 2, layouts.IGNORED)}


def padding() -> dict[str, Tensor]:
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :3], mask[1, 9:] = 0, 0
    return {**handwritten_batch(), "attention_mask": mask}


def masked(additive: bool) -> dict[str, Tensor]:
    document = layouts.documents(LENGTH)
    mask = (document[:, None] == document).tril().expand(2, 1, -1, -1).contiguous()
    added = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, float("-inf"))
    return {**handwritten_batch(), "mask": added if additive else mask}


CAUSALLY = {"attention": {"causal"}}
OF_LOSS: dict[str, Any] = {"reduce": lambda out: out[1], **CAUSALLY}
ODD: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], dict[str, Any]]] = {  # a model, its inputs, what is asked of it
    "time first": (decoders.TimeFirst, time_first, CAUSALLY),
    "unbatched": (decoders.Unbatched, lambda: {k: v[0] for k, v in handwritten_batch(1, decoders.HEAD).items()}, CAUSALLY),
    "logits and loss": (decoders.NanoGPT, targets, OF_LOSS),
    "logits and a loss that shifts": (lambda: decoders.NanoGPT(shifted_inside=True), targets, OF_LOSS),
    # keys of another sequence, whose gradients are sums over all chunks
    "cross attention": (decoders.CrossAttention, lambda: {**handwritten_batch(), "memory": rows(2, 5, WIDTH)}, {}),
    "as many keys as rows": (decoders.CrossAttention, lambda: {**handwritten_batch(), "memory": rows(2, LENGTH, WIDTH)}, {}),
    "padding mask": (decoders.PaddingMask, padding, {}),
    "boolean mask from outside": (decoders.GivenMask, lambda: masked(False), {"attention": {"masked"}}),
    "additive mask from outside": (decoders.GivenMask, lambda: masked(True), {"attention": {"masked"}}),
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
