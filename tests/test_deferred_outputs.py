"""Which outputs are deferred, and that they are exact in models, under every head, and for every length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional as F

from streamfx.frontend.backend import streambp
from streamfx.lazy import steps
from streamfx.lazy.deferred import DeferredTensor
from tests.support.deferred import OPTIONS, assert_same, gradients, own_loss
from tests.support.heads import BATCH, HEADS, LENGTH, MIXED, Decoder, capped_head, decoder, some_ids, with_views
from tests.support.spread import only

USES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "only the loss": lambda loss, logits, ids: loss,
    "only the logits": lambda loss, logits, ids: own_loss(logits, ids),
    "both in one backward": lambda loss, logits, ids: loss + own_loss(logits, ids),
    "some rows": lambda loss, logits, ids: loss + (logits[:, -1] ** 3).sum(),
}


def tiny(family: str) -> Any:
    import transformers

    sizes = {
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "use_cache": False,
    }  # fmt: skip
    config = getattr(transformers, f"{family}Config")(**sizes)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").double()


@pytest.mark.parametrize("family", only(["Gemma2"], ["Qwen3", "Gemma2"]))
def test_models_of_transformers_are_exact(family: str) -> None:
    pytest.importorskip("transformers")
    model = tiny(family)
    compiled = torch.compile(model, backend="streambp", options={"chunk_size": 6})
    ids = torch.randint(0, 96, (BATCH, LENGTH))
    for use in USES.values():
        results = []
        for function in (compiled, model):
            output = function(input_ids=ids, labels=ids)
            loss = use(output.loss, output.logits, ids)
            loss.backward()
            results.append((loss.detach(), output.logits.detach(), gradients(model)))
            assert isinstance(output.logits, DeferredTensor) == (function is compiled)
        assert_same(results[0][0], results[1][0])
        assert_same(results[0][1] * 1, results[1][1])
        assert_same(results[0][2], results[1][2])


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", ["linear", "weights made of rows", "all rows added", *MIXED])
def test_rows_that_are_read_alone(name: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of logits so large that they are never made whole, where the norm in front of the head reads other rows."""
    monkeypatch.setattr(steps, "LEAST", 1)
    model, ids = decoder(HEADS[name][0]), some_ids(60)[:batch]
    compiled = torch.compile(model, backend="streambp", options=OPTIONS)
    for read in (lambda logits: logits[:, -1], lambda logits: logits[:, 3:9] * 1, lambda logits: logits[-1, 5].argmax(-1)):
        with torch.no_grad():
            torch.testing.assert_close(read(compiled(ids)) * 1, read(model(ids)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", HEADS)
def test_heads_are_exact(name: str) -> None:
    """Outputs, and gradients of the loss alone and of all outputs, equal eager's; as many as expected are deferred."""
    head, number = HEADS[name]
    model = decoder(head)
    compiled = torch.compile(model, backend="streambp", options=OPTIONS)
    ids = some_ids()
    results = []
    for function in (compiled, model):
        outputs = function(ids, ids)
        if function is compiled:
            assert sum(isinstance(output, DeferredTensor) for output in outputs) == number
        outputs[0].backward(retain_graph=True)
        of_loss = gradients(model)
        weighted = [(o * torch.arange(o.numel()).view(o.shape)).sum() for o in outputs[1:] if o.requires_grad]
        (outputs[0] + sum(weighted)).backward()
        results.append((outputs, of_loss, gradients(model)))
    assert_same(results[0], results[1])


def test_views_of_one_value_share_memory() -> None:
    model = decoder(lambda m, x, ids: with_views(F.linear(x, m.weight)))
    with torch.no_grad():
        _, logits, shifted, _ = torch.compile(model, backend="streambp", options=OPTIONS)(some_ids(), some_ids())
        shifted[:, 0] = 7.0
    assert isinstance(logits, DeferredTensor)
    assert (logits[:, 0] == 7.0).all()


def test_the_same_value_twice_is_one_tensor() -> None:
    model = decoder(lambda m, x, ids: (F.linear(x, m.weight),) * 2)
    outputs = torch.compile(model, backend="streambp", options=OPTIONS)(some_ids(), some_ids())
    assert outputs[1] is outputs[2]


def test_lengths_that_change() -> None:
    model = decoder()
    compilations: list[fx.GraphModule] = []

    def counted(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        compilations.append(module)
        return streambp(module, inputs, options=OPTIONS)

    compiled = torch.compile(model, backend=counted)
    for length in (11, 7, 19, 23):
        ids = some_ids(length)
        results = []
        for function in (compiled, model):
            loss, logits = function(ids, ids)
            (loss + own_loss(logits, ids)).backward()
            results.append((loss, logits, gradients(model)))
        assert_same(results[0], results[1])
        assert isinstance(results[0][1], DeferredTensor)
    assert len(compilations) == 2


def test_autocast_of_the_call_is_that_of_the_touch() -> None:
    model = Decoder(capped_head)
    ids = some_ids()
    with torch.autocast("cpu", torch.bfloat16):
        _, ours = torch.compile(model, backend="streambp", options=OPTIONS)(ids, ids)
        _, theirs = model(ids, ids)
    assert isinstance(ours, DeferredTensor)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    assert_same(ours * 1, theirs, tolerance=2e-2)


def test_autocast_inside_the_model() -> None:
    def head(model: Decoder, x: Tensor, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(x, model.weight)

    model = Decoder(head)
    ids = some_ids()
    _, ours = torch.compile(model, backend="streambp", options=OPTIONS)(ids, ids)
    _, theirs = model(ids, ids)
    assert isinstance(ours, DeferredTensor)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    assert_same(ours * 1, theirs, tolerance=2e-2)
