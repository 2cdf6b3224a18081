"""Outputs that are computed when they are touched: exact, like dense ones, and free when nobody touches them."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from streamfx import StaleOutput
from streamfx.backend import Compilation, streambp
from streamfx.deferral import defer_outputs
from streamfx.options import resolved
from streamfx.runtime.deferred import DeferredTensor
from streamfx.runtime.outer import OuterRunner
from streamfx.runtime.rebuild import Source
from tests.support.precision import widen_transformers

widen_transformers()

VOCABULARY, WIDTH, BATCH, LENGTH = 40, 8, 2, 11
OPTIONS: dict[str, Any] = {"chunk_size": 4, "loss_chunk_size": 4}
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "grad": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


class Decoder(nn.Module):
    """One attention layer and a head: `head(self, hidden, ids)` gives the logits, or several outputs, logits first."""

    def __init__(self, head: Callable[..., Any]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH))
        self.down, self.up = nn.Parameter(torch.randn(WIDTH, 2)), nn.Parameter(torch.randn(2, VOCABULARY))
        self.bias = nn.Parameter(torch.randn(VOCABULARY))
        self.register_buffer("mask", torch.randn(VOCABULARY))
        self.head = head

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        x = self.embedding(ids)
        query, key, value = self.qkv(x)[:, None].chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True)[:, 0])
        made = self.head(self, F.layer_norm(x, (WIDTH,)), ids)
        outputs = made if isinstance(made, tuple) else (made,)
        if labels is None:
            return outputs[0]
        logits = outputs[0].reshape(-1, outputs[0].shape[-1])
        return F.cross_entropy(logits, labels.reshape(-1)[-logits.shape[0] :]), *outputs


def plain_head(model: Decoder, x: Tensor, ids: Tensor) -> Tensor:
    return F.linear(x, model.weight)


def capped_head(model: Decoder, x: Tensor, ids: Tensor) -> Tensor:
    return torch.tanh(F.linear(x, model.weight) / 3.0) * 3.0


def decoder(head: Callable[..., Any] = capped_head) -> Decoder:
    torch.manual_seed(0)
    return Decoder(head).double()


def some_ids(length: int = LENGTH) -> Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, length), generator=torch.Generator().manual_seed(length))


def gradients(model: nn.Module) -> list[Tensor | None]:
    """The gradients, taken away."""
    found = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return found


def assert_same(ours: Any, theirs: Any, tolerance: float = 1e-12) -> None:
    """Equal to `tolerance`, relative to the norm; tensors may be deferred."""
    if isinstance(theirs, (list, tuple)) and not isinstance(theirs, torch.Size):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            assert_same(a, b, tolerance)
    elif isinstance(theirs, Tensor):
        assert isinstance(ours, Tensor)
        look = [(t.shape, t.stride(), t.dtype, t.device, t.requires_grad, t.is_leaf) for t in (ours, theirs)]
        assert look[0] == look[1]
        difference = (ours.detach().double() - theirs.detach().double()).norm().item()
        assert difference <= tolerance * theirs.detach().double().norm().item()
    elif isinstance(theirs, (float, np.ndarray)):
        np.testing.assert_allclose(ours, theirs, rtol=tolerance)
    else:
        assert ours == theirs


# -- where the logits are used


USES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "only the loss": lambda loss, logits, ids: loss,
    "only the logits": lambda loss, logits, ids: own_loss(logits, ids),
    "both in one backward": lambda loss, logits, ids: loss + own_loss(logits, ids),
    "some rows": lambda loss, logits, ids: loss + (logits[:, -1] ** 3).sum(),
}


def own_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), ids.flip(1)) + logits.sigmoid().mean()


def tiny(family: str) -> Any:
    import transformers

    sizes = {
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "use_cache": False,
    }  # fmt: skip
    config = getattr(transformers, f"{family}Config")(**sizes)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").double()


@pytest.mark.parametrize("family", ["Qwen3", "Gemma2"])
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


HEADS: dict[str, tuple[Callable[..., Any], int]] = {
    "linear": (plain_head, 1),
    "softcap": (capped_head, 1),
    "bias": (lambda m, x, ids: F.linear(x, m.weight, m.bias), 1),
    "transposed weight": (lambda m, x, ids: x @ m.weight.T, 1),
    "einsum": (lambda m, x, ids: torch.einsum("btd,vd->btv", x, m.weight), 1),
    "low rank": (lambda m, x, ids: x @ m.down @ m.up, 1),
    "adapter": (lambda m, x, ids: F.linear(x, m.weight) + 2 * (x @ m.down @ m.up), 1),
    "mask": (lambda m, x, ids: F.linear(x, m.weight).masked_fill(m.mask > 0, -1e4), 1),
    "log-probabilities": (lambda m, x, ids: F.log_softmax(F.linear(x, m.weight), -1), 1),
    "unbatched": (lambda m, x, ids: F.linear(x.view(-1, WIDTH), m.weight), 1),
    "time first": (lambda m, x, ids: F.linear(x.transpose(0, 1), m.weight).transpose(0, 1), 1),
    "two heads": (lambda m, x, ids: (F.linear(x, m.weight), F.linear(x * 2, m.weight)), 2),
    "logits and probabilities": (lambda m, x, ids: with_probabilities(F.linear(x, m.weight)), 2),
    "twice the same": (lambda m, x, ids: (F.linear(x, m.weight),) * 2, 2),
    "a view of it": (lambda m, x, ids: with_views(F.linear(x, m.weight)), 3),
    "detached": (lambda m, x, ids: (F.linear(x, m.weight), F.linear(x, m.weight).detach()), 2),
    "hidden states too": (lambda m, x, ids: (F.linear(x, m.weight), x), 1),
    "a view of hidden states": (lambda m, x, ids: (F.linear(x, m.weight), x.view(-1, WIDTH)), 1),
    "a view of a parameter too": (lambda m, x, ids: (F.linear(x, m.weight), m.weight.view(-1)), 1),
    "no_grad inside": (lambda m, x, ids: without_grad(m, x), 2),
    "written into": (lambda m, x, ids: written(F.linear(x, m.weight)), 0),
    "set item": (lambda m, x, ids: with_item(F.linear(x, m.weight)), 0),
    "made from what is then written into": (lambda m, x, ids: doubled_before(F.linear(x, m.weight)), 0),
    "dropout": (lambda m, x, ids: F.dropout(F.linear(x, m.weight), 0.0), 0),
}


def with_probabilities(logits: Tensor) -> tuple[Tensor, Tensor]:
    return logits, logits.softmax(-1)


def with_views(logits: Tensor) -> tuple[Tensor, ...]:
    return logits, logits[:, :-1], logits.transpose(1, 2)


def without_grad(model: Decoder, x: Tensor) -> tuple[Tensor, Tensor]:
    logits = F.linear(x, model.weight)
    with torch.no_grad():
        return logits, F.linear(x, model.weight) * 2


def written(logits: Tensor) -> Tensor:
    logits += 1
    return logits


def with_item(logits: Tensor) -> Tensor:
    logits[:, :, 0] = -5.0
    return logits


def doubled_before(logits: Tensor) -> Tensor:
    doubled = logits * 2
    logits.mul_(3)
    return doubled


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


# -- the tensor


class Compiled:
    """A model's compiled graph, called past Dynamo, so that many tests share one compilation."""

    def __init__(self, model: Decoder, mode: str) -> None:
        self.model, self.mode, self.ids = model, MODES[mode], some_ids()
        calls: list[tuple[Callable[..., Any], list[Any]]] = []

        def backend(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            calls.append((streambp(module, inputs, options=OPTIONS), list(inputs)))
            return calls[-1][0]

        with self.mode():
            torch.compile(model, backend=backend)(self.ids)
        ((self._function, self._inputs),) = calls

    def deferred(self) -> Tensor:
        (logits,) = self._function(*self._inputs)
        assert isinstance(logits, DeferredTensor)
        return logits

    def dense(self) -> Tensor:
        logits: Tensor = self.model(self.ids)
        return logits


@pytest.fixture(scope="module")
def compilations() -> dict[str, Compiled]:
    return {mode: Compiled(decoder(), mode) for mode in MODES}


@pytest.fixture
def compiled(compilations: dict[str, Compiled]) -> Iterator[Compiled]:
    yield compilations["grad"]
    compilations["grad"].model.zero_grad()


def assert_behaves(compiled: Compiled, function: Callable[[Tensor], Any], tolerance: float = 1e-12) -> None:
    """A function does the same to both tensors, also where it raises."""
    results = []
    for tensor in (compiled.deferred(), compiled.dense()):
        try:
            results.append([function(tensor), gradients(compiled.model)])
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            results.append([type(error), gradients(compiled.model)])
    assert_same(results[0], results[1], tolerance)


def changed(tensor: Tensor, change: Callable[[Tensor], Any]) -> Tensor:
    change(tensor)
    return tensor


IDS = some_ids()[..., None]
FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "metadata": lambda x: (x.shape, x.size(1), x.ndim, x.numel(), x.dtype, x.layout, x.is_floating_point(), len(x)),
    "strides": lambda x: (x.stride(), x[:, -1].stride(), x[:, -1].storage_offset(), x[:, -1].is_contiguous()),
    "argmax": lambda x: x.argmax(-1),
    "last row": lambda x: x[:, -1],
    "last rows": lambda x: x[:, -3:].neg(),
    "every third row": lambda x: x[:, ::3] > 0,
    "one number": lambda x: x[0, 0, 0].item(),
    "to a list": lambda x: x.tolist(),
    "numpy": lambda x: x.detach().numpy(),
    "numpy of what needs a gradient": lambda x: x.numpy(),
    "array": lambda x: np.asarray(x.detach()),
    "dlpack": lambda x: torch.utils.dlpack.from_dlpack(x.detach()),
    "text": lambda x: repr(x.detach()),
    "format": lambda x: f"{x[0, 0, 0].detach():.4f}",
    "iteration": lambda x: [row.sum() for row in x],
    "equal": lambda x: (torch.equal(x, x), bool((x == x).all())),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data.sum(),
    "same device": lambda x: (x.cpu() is x, x.to(x.dtype) is x, x.contiguous() is x),
    "view": lambda x: x.view(-1, VOCABULARY)[3],
    "reshape": lambda x: x.reshape(-1, VOCABULARY)[::2],
    "transposes": lambda x: (x.mT, x.permute(2, 0, 1)[3:5], x[0].T[3]),
    "shifted": lambda x: x[..., :-1, :].contiguous().view(-1, VOCABULARY),
    "split": lambda x: (x.split(3, 1)[2] * 2, x.unbind(0)[1], x.chunk(4, 1)[3]),
    "mask": lambda x: x[x > 0],
    "gather": lambda x: x.log_softmax(-1).gather(-1, IDS),
    "topk": lambda x: x.topk(3).values,
    "stack": lambda x: torch.stack([x, x * 2]),
    "cross entropy": lambda x: F.cross_entropy(x.transpose(1, 2), IDS[..., 0]),
    "einsum": lambda x: torch.einsum("btv,btv->bt", x, x),
    "vmap": lambda x: torch.vmap(torch.sum)(x),
    "as strided": lambda x: x.as_strided((2, 3), (440, 1), 40) * 1,
    "expand": lambda x: x[:, -1:].expand(2, 5, VOCABULARY) + 1,
    "clone": lambda x: x.clone(),
    "foreach": lambda x: torch._foreach_mul([x, x], 2.0)[0],
    "write": lambda x: changed(x, lambda x: x.add_(1)),
    "write a row": lambda x: changed(x, lambda x: x[:, 0].mul_(3)),
    "set an item": lambda x: changed(x, lambda x: x.__setitem__((slice(None), -1), 0.0)),
    "write after a row was read": lambda x: (lambda row, sum: (x.mul_(2), row + sum)[1])(x[:, -1], x[:, -1].sum()),
    "write into a row that was read": lambda x: (lambda row: (row.sum(), row.mul_(2), x.sum()))(x[:, -1]),
    "transpose in place": lambda x: changed(x * 1, lambda x: x.transpose_(0, 2)),
    "transpose it in place": lambda x: (lambda row: (x.transpose_(0, 2), x.add_(1), row * 1)[2])(x[0]),
    "detach in place": lambda x: (x.detach_().requires_grad, x.sum()),
    "other data": lambda x: changed(x.detach(), lambda x: setattr(x, "data", torch.ones_like(x))),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_it_is_that_of_the_dense_one(compilations: dict[str, Compiled], name: str, mode: str) -> None:
    with MODES[mode]():
        assert_behaves(compilations[mode], FUNCTIONS[name])


CASTS: dict[str, Callable[[Tensor], Tensor]] = {
    "float": lambda x: x.float(),
    "to bfloat16": lambda x: x.to(torch.bfloat16)[:, -1],
    "half": lambda x: x.half(),
    "a slice of a cast": lambda x: x.float()[:, -1, :5],
    "softmax in another type": lambda x: F.softmax(x, -1, dtype=torch.float32),
    "a cast before a write": lambda x: (lambda cast: (x.mul_(2), cast)[1])(x.float()),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASTS)
def test_casts(compilations: dict[str, Compiled], name: str, mode: str) -> None:
    with MODES[mode]():
        assert_behaves(compilations[mode], CASTS[name], tolerance=5e-3)


@pytest.mark.parametrize("trip", ["save", "pickle", "copy"])
def test_saved_it_is_a_plain_tensor(compilations: dict[str, Compiled], trip: str) -> None:
    with torch.no_grad():
        compiled = compilations["no_grad"]
        logits = compiled.deferred()
        if trip == "save":
            file = io.BytesIO()
            torch.save({"logits": logits}, file)
            file.seek(0)
            again = torch.load(file)["logits"]
        else:
            again = pickle.loads(pickle.dumps(logits)) if trip == "pickle" else copy.deepcopy(logits)
        assert type(again) is Tensor
        assert_same(again, compiled.dense())


# -- gradients through it


WEIGHTS = torch.randn(BATCH, LENGTH, VOCABULARY, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Exponential(torch.autograd.Function):
    """As fused losses are written."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp().sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x.exp()


def backward_twice(x: Tensor) -> None:
    total = (x * WEIGHTS).sum()
    total.backward(retain_graph=True)
    total.backward()


def backward_with_hook(x: Tensor) -> list[Tensor]:
    seen: list[Tensor] = []
    x.register_hook(lambda gradient: seen.append(gradient.clone()) or gradient * 2)  # type: ignore[func-returns-value]
    (x * WEIGHTS).sum().backward()
    return seen


def backward_with_retained(x: Tensor) -> Tensor | None:
    x.retain_grad()
    (x * WEIGHTS).sum().backward()
    return x.grad


def backward_after_write(x: Tensor) -> None:
    x[:, 0].mul_(x[:, 1].detach().clone())
    x[:, :, 3] = 0.0
    (x * WEIGHTS).sum().backward()


def backward_of_stale(x: Tensor) -> None:
    total = (x * x).sum()
    x.add_(1)
    total.backward()


def backward_after_inference(x: Tensor) -> Tensor:
    with torch.inference_mode():
        best = x.argmax(-1).sum().item()
    (x * WEIGHTS).sum().backward()
    return torch.tensor(best)


def backward_checkpointed(x: Tensor, reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    checkpoint(lambda x: (x.tanh() * WEIGHTS).sum(), x, use_reentrant=reentrant).backward()


def backward_saved_on_cpu(x: Tensor) -> None:
    with torch.autograd.graph.save_on_cpu():
        total = (x.exp() * x * WEIGHTS).sum()
    total.backward()


BACKWARDS: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda x: (x * WEIGHTS).sum().backward(),
    "its own": lambda x: x.backward(WEIGHTS),
    "autograd.backward": lambda x: torch.autograd.backward([x], [WEIGHTS]),
    "autograd.grad": lambda x: torch.autograd.grad((x * WEIGHTS).sum(), [x]),
    "a row": lambda x: (x[:, -1] ** 3).sum().backward(),
    "a cast and the whole": lambda x: (x[:, -1].double().exp().sum() + (x.softmax(-1) * WEIGHTS).sum()).backward(),
    "a custom function": lambda x: Exponential.apply(x).backward(),
    "twice, retained": backward_twice,
    "twice, freed": lambda x: [(x * WEIGHTS).sum().backward() for _ in range(2)],
    "a hook": backward_with_hook,
    "a retained gradient": backward_with_retained,
    "after a write": backward_after_write,
    "of a value that was then written into": backward_of_stale,
    "after a touch in inference mode": backward_after_inference,
    "reentrant checkpoint": lambda x: backward_checkpointed(x, True),
    "checkpoint": lambda x: backward_checkpointed(x, False),
    "saved on the host": backward_saved_on_cpu,
}


@pytest.mark.parametrize("name", BACKWARDS)
def test_gradients_through_it(compiled: Compiled, name: str) -> None:
    assert_behaves(compiled, BACKWARDS[name])


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "streambp"])
def test_as_argument_of_another_compiled_function(compiled: Compiled, backend: str) -> None:
    def consumer(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return F.cross_entropy(x.transpose(1, 2) * 2, IDS[..., 0]), x.detach()[:, 0], x.argmax(-1)

    function = torch.compile(consumer, backend=backend, fullgraph=True)

    def use(x: Tensor) -> tuple[Tensor, ...]:
        loss, *others = function(x)
        loss.backward()
        return loss.detach(), *(other * 1 for other in others)

    assert_behaves(compiled, use)


def test_across_a_graph_break() -> None:
    model = decoder()

    def step(ids: Tensor) -> tuple[Tensor, str]:
        logits = model(ids)
        torch._dynamo.graph_break()
        text = repr(logits.detach())
        loss = F.cross_entropy(logits.transpose(1, 2), ids)
        loss.backward()
        return loss.detach(), text

    results = []
    for function in (torch.compile(step, backend="streambp", options=OPTIONS), step):
        results.append([function(some_ids()), gradients(model)])
    assert_same(results[0], results[1])


# -- what it costs


def test_it_is_computed_once_and_only_when_its_values_are_needed(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = count_calls(monkeypatch, Source, "_recorded")
    logits = compiled.deferred()
    pytree.tree_map(lambda x: x.detach(), {"logits": [logits]})
    lazy = [logits.detach(), logits.float(), logits[:, -1], logits[0, :3].bfloat16()]
    assert all(isinstance(item, DeferredTensor) for item in lazy)
    assert isinstance(logits, Tensor)
    assert logits.shape == (BATCH, LENGTH, VOCABULARY)
    assert not computed
    logits.argmax(-1)
    logits.float().sum()
    (logits * WEIGHTS).sum().backward()
    assert len(computed) == 1


def test_few_rows_are_computed_by_themselves(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = count_calls(monkeypatch, Source, "_recorded")
    rows = count_calls(monkeypatch, Source, "rebuild_rows")
    logits = compiled.deferred()
    logits[:, -1].argmax(-1)
    logits.float()[0, -2:].sum()
    assert (len(rows), len(whole)) == (2, 0)
    logits[:, 1:].sum()
    logits[:, 0].sum()
    assert (len(rows), len(whole)) == (2, 1)


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[None]:
    calls: list[None] = []
    method = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return method(*args, **kwargs)

    monkeypatch.setattr(owner, name, counted)
    return calls


def test_it_is_freed_with_its_last_reference(compiled: Compiled) -> None:
    gc.disable()
    try:
        logits = compiled.deferred()
        (logits.exp() * logits).sum().backward()
        references = [weakref.ref(item) for item in (logits._cell.value, logits._cell.source, logits._cell)]  # type: ignore[attr-defined]
        del logits
        assert all(reference() is None for reference in references)
    finally:
        gc.enable()


class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
    """The numbers of elements of all tensors that operators make."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.made += [item.numel() for item in pytree.tree_leaves(result) if isinstance(item, Tensor)]
        return result


@pytest.mark.parametrize("head", [plain_head, capped_head])
def test_no_tensor_of_all_logits_exists_when_only_the_loss_is_used(
    head: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the logits nor their gradient, in the forward and the backward."""
    model, ids, sizes, run = decoder(head), some_ids(64), Sizes(), OuterRunner.__call__

    def watched(self: OuterRunner, arguments: list[Any]) -> Any:
        with sizes:
            return run(self, arguments)

    monkeypatch.setattr(OuterRunner, "__call__", watched)
    loss, logits = torch.compile(model, backend="streambp", options=OPTIONS)(ids, ids)
    loss.backward()
    assert logits.numel() == BATCH * 64 * VOCABULARY
    assert sizes.made
    assert max(sizes.made) < logits.numel()


def test_dense_outputs_are_plain() -> None:
    model = decoder()
    compiled = torch.compile(model, backend="streambp", options={**OPTIONS, "outputs": "dense"})
    results = []
    for function in (compiled, model):
        loss, logits = function(some_ids(), some_ids())
        (loss + own_loss(logits, some_ids())).backward()
        assert type(logits) is Tensor
        results.append((loss, logits, gradients(model)))
    assert_same(results[0], results[1])


# -- changed parameters


def test_a_changed_parameter_is_noticed(compiled: Compiled) -> None:
    logits = compiled.deferred()
    with torch.no_grad():
        compiled.model.weight.mul_(1.0)
    with pytest.raises(StaleOutput) as raised:
        logits.argmax(-1)
    text = str(raised.value)
    assert "is computed when it is first used" in text
    assert "weight was changed in place since the call (1 time)" in text
    assert '"outputs": "dense"' in text
    assert logits.shape == (BATCH, LENGTH, VOCABULARY)


def test_a_parameter_may_change_after_the_first_use(compiled: Compiled) -> None:
    logits, dense = compiled.deferred(), compiled.dense().detach()
    logits.sum()
    with torch.no_grad():
        compiled.model.weight.mul_(1.0)
    assert_same(logits.detach() * 1, dense)


def test_a_parameter_may_be_given_other_data(compiled: Compiled) -> None:
    """The deferred tensor keeps the memory that the parameter had in the call."""
    logits, dense = compiled.deferred(), compiled.dense().detach()
    weight = compiled.model.weight
    weight.data, before = torch.zeros_like(weight), weight.data
    try:
        assert_same(logits.detach() * 1, dense)
    finally:
        weight.data = before


def test_a_training_loop_is_exact() -> None:
    losses = []
    for compiled in (True, False):
        model = decoder()
        function = torch.compile(model, backend="streambp", options=OPTIONS) if compiled else model
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        for _ in range(3):
            loss, logits = function(some_ids(), some_ids())
            (loss + logits.logsumexp(-1).mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    assert_same(losses[:3], losses[3:])


# -- the pass


def dynamo_graph(model: nn.Module, *arguments: Any) -> fx.GraphModule:
    graphs: list[fx.GraphModule] = []

    def backend(module: fx.GraphModule, inputs: list[Any]) -> fx.GraphModule:
        graphs.append(module)
        return module

    torch.compile(model, backend=backend)(*arguments)
    return graphs[0]


PLAN = """
deferred made [2, 11, 40] torch.float64 on cpu, from weight, layer_norm
  linear_2 = linear(layer_norm, weight)
  truediv = truediv(linear_2, 3.0)
  tanh = tanh(truediv)
  made = mul(tanh, 3.0)
"""


def test_the_plan_as_text() -> None:
    module = dynamo_graph(decoder(), some_ids(), some_ids())
    before = module.print_readable(print_output=False)
    deferral = defer_outputs(module)
    assert deferral is not None
    names = [str(node) for node in deferral.module.graph.output_node().args[0]]  # type: ignore[union-attr]
    assert names == ["cross_entropy", "layer_norm"]
    assert str(deferral.plan) == PLAN.strip()
    assert module.print_readable(print_output=False) == before


@pytest.mark.parametrize(("head", "given"), [("linear", "weight, layer_norm"), ("low rank", "up, matmul")])
def test_a_value_is_rebuilt_from_the_fewest_bytes(head: str, given: str) -> None:
    deferral = defer_outputs(dynamo_graph(decoder(HEADS[head][0]), some_ids()))
    assert deferral is not None
    assert str(deferral.plan.recipes[0]).endswith(f"from {given}")


@pytest.mark.parametrize(
    ("head", "dims"),
    [
        ("linear", (0, 1, None)),
        ("softcap", (0, 1, None)),
        ("mask", (0, 1, None)),
        ("log-probabilities", (0, 1, None)),
        ("einsum", None),
    ],
)
def test_rows_are_known_where_functions_work_row_by_row(head: str, dims: tuple[int | None, ...] | None) -> None:
    deferral = defer_outputs(dynamo_graph(decoder(HEADS[head][0]), some_ids()))
    assert deferral is not None
    rows = deferral.plan.recipes[0].rows
    assert (None if rows is None else rows.dims) == dims


def test_small_outputs_stay_as_they_are() -> None:
    def head(model: Decoder, x: Tensor, ids: Tensor) -> Tensor:
        return F.linear(x, model.weight[:12])  # less than twice the width

    assert defer_outputs(dynamo_graph(decoder(head), some_ids())) is None


def test_an_error_in_the_search_leaves_outputs_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(module: fx.GraphModule) -> None:
        raise KeyError("lost")

    monkeypatch.setattr("streamfx.backend.defer_outputs", broken)
    module = dynamo_graph(decoder(), some_ids())
    assert Compilation(module, resolved()).deferral() is None
    with pytest.raises(KeyError):
        Compilation(module, resolved({"strict": True})).deferral()
