"""Promise one: gradients equal eager autograd's, over models, layouts, lengths and chunk sizes."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import streamfx
from tests.support import decoders, hf, layouts
from tests.support.decoders import WIDTH  # noqa: F401  (in tests/tables)
from tests.support.exactness import check_streamed, compare
from tests.support.spread import only
from tests.support.tables import named_cases
from tests.support.twins import batch, compiled, twins

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


class Broken(decoders.Plain):
    def hidden(self, x: Tensor, **more: object) -> Tensor:
        x = x + self.attend[0](self.norms[0](x))
        torch._dynamo.graph_break()
        x = x + self.attend[1](self.norms[2](x))
        return self.norms[-1](x)


class Checkpointed(decoders.Plain):
    def layer(self, x: Tensor, i: int, **more: Any) -> Tensor:
        return checkpoint(super().layer, x, i, use_reentrant=True)  # type: ignore[return-value]


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


CAUSALLY = {"attention": {"causal"}}
ODD: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], dict[str, Any]]] = named_cases("other models", globals())


@pytest.mark.parametrize("name", only(["a graph break", "reentrant checkpoints"], ODD))
def test_other_models_are_exact(name: str) -> None:
    make, inputs, asked = ODD[name]
    compare(decoders.made(make), inputs(), also=CHUNKS, **asked)


@pytest.mark.parametrize("mode", [torch.no_grad, pytest.param(torch.inference_mode, marks=pytest.mark.long)])
def test_without_gradients(mode: Callable[[], Any]) -> None:
    own, eager = twins()
    function, backend = compiled(own)
    with mode():
        torch.testing.assert_close(function(**batch()), eager(**batch()), rtol=1e-12, atol=0)
    check_streamed(backend.facts, True, {"causal"})


def test_backward_twice_is_refused() -> None:
    function, _ = compiled(decoders.made(decoders.Plain))
    loss = function(**batch())
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


# -- without gradients: a cache of a prompt, calls that continue from it, a loss in the memory of one layer

ROWS, PROMPT = 40, 23
CACHED: dict[str, Any] = {"chunk_size": 7, "loss_chunk_size": 7, "bodies": "eager"}


@pytest.mark.long
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_prompt_and_its_continuation_equal_eager(mode: Any) -> None:
    """A token, and all that is left; the second prompt is shorter than that, and its length a symbol."""
    model, ids = hf.made("llama").eval(), layouts.tokens(hf.VOCABULARY, 2, ROWS)
    both: Any = torch.compile(model, backend="streambp", options=CACHED), model
    with mode():
        for prompt in (PROMPT, 6):
            pasts: list[Any] = [None, None]
            for first, last in ((0, prompt), (prompt, prompt + 1), (prompt + 1, ROWS)):
                results = [
                    run(ids[:, first:last], past_key_values=past, use_cache=True) for run, past in zip(both, pasts, strict=True)
                ]
                pasts = [result.past_key_values for result in results]
                caches = [[(layer.keys, layer.values) for layer in past.layers] for past in pasts]
                torch.testing.assert_close(results[0].logits + 0, results[1].logits, rtol=1e-10, atol=1e-12)
                torch.testing.assert_close(*caches, rtol=1e-10, atol=1e-12)


def test_the_continuation_of_a_prompt_streams() -> None:
    model, ids = hf.made("llama").eval(), layouts.tokens(hf.VOCABULARY, 2, ROWS)
    with torch.no_grad():
        past = model(ids[:, :PROMPT], use_cache=True).past_key_values
        found = streamfx.explain(model, ids[:, PROMPT:], past_key_values=past, use_cache=True, chunk_size=5, bodies="eager")
    assert [(stage.kind, stage.attention) for stage in found.stages] == [("streamed", ("causal",))] * 2


def test_a_loss_takes_the_memory_of_one_layer() -> None:
    ids, peaks = layouts.tokens(hf.VOCABULARY, 2, 60), []
    for layers in (2, 5):
        with torch.no_grad():
            found = streamfx.explain(hf.deep(hf.llama, layers).eval(), ids, labels=ids, use_cache=False, **CACHED)
        assert all(stage.kind == "streamed" for stage in found.stages)
        peaks.append(found.summary(with_baseline=False)["peak_bytes"])
    assert peaks[0] == peaks[1]
