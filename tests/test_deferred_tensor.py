"""A deferred tensor behaves like a dense one under reads, views, writes, serialization and autograd."""

import copy
import io
import pickle
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np  # noqa: F401  (in tests/tables)
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import streamfx
from streamfx.lazy import deferred, steps, streamed
from tests.support.deferred import IDS, MODES, OPTIONS, WEIGHTS, Compiled, assert_behaves, assert_same, gradients
from tests.support.heads import HEADS, VOCABULARY, decoder
from tests.support.spread import only
from tests.support.tables import named_cases

pytestmark = pytest.mark.compiled


@pytest.fixture(scope="module")
def compilations() -> dict[str, Compiled]:
    return {mode: Compiled(decoder(), mode) for mode in MODES}


def changed(tensor: Tensor, change: Callable[[Tensor], Any]) -> Tensor:
    change(tensor)
    return tensor


def saved(x: Tensor) -> tuple[Any, Tensor]:
    file = io.BytesIO()
    torch.save({"logits": x.detach()}, file)
    file.seek(0)
    loaded = torch.load(file)["logits"]
    return type(loaded), loaded


def copied(x: Tensor) -> tuple[Any, ...]:
    made = pickle.loads(pickle.dumps(x.detach())), copy.deepcopy(x.detach())
    return *map(type, made), *made


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = named_cases("functions", globals(), "x")
CASTS: dict[str, Callable[[Tensor], Tensor]] = named_cases("casts", globals(), "x")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [*FUNCTIONS, *CASTS])
def test_functions_of_deferred_and_dense_tensors_agree(compilations: dict[str, Compiled], name: str, mode: str) -> None:
    with MODES[mode]():
        assert_behaves(compilations[mode], {**FUNCTIONS, **CASTS}[name], 5e-3 if name in CASTS else 1e-12)


# -- gradients through it


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


def with_hook(x: Tensor) -> list[Tensor | None]:
    seen: list[Tensor | None] = []
    x.retain_grad()
    x.register_hook(lambda gradient: seen.append(gradient.clone()) or gradient * 2)  # type: ignore[func-returns-value]
    (x * WEIGHTS).sum().backward()
    return [*seen, x.grad]


def after_write(x: Tensor) -> None:
    x[:, 0].mul_(x[:, 1].detach().clone())
    x[:, :, 3] = 0.0
    (x * WEIGHTS).sum().backward()


def checkpointed(x: Tensor) -> None:
    checkpoint(lambda x: (x.tanh() * WEIGHTS).sum(), x, use_reentrant=False).backward()  # type: ignore[no-untyped-call]


def of_view_before_write(x: Tensor) -> Tensor:
    """The view's first use is one that has no gradient."""
    last = x[:, -1]
    x.mul_(2)
    best = last.argmax(-1)
    (last * WEIGHTS[:, -1]).sum().backward()
    return best


def of_view_with_hook(x: Tensor) -> None:
    """A write that autograd does not see leaves the view its history."""
    part = x[:, 1:]
    part.register_hook(lambda gradient: gradient * 1.5)
    x.data.mul_(0.75)
    (part.square() * WEIGHTS[:, 1:]).sum().backward()


def of_stale(x: Tensor) -> None:
    total = (x * x).sum()
    x.add_(1)
    total.backward()


def emptied_later(x: Tensor) -> None:
    """One gradient goes to two uses; the one that comes later has a hook that empties it."""
    scale, seen = torch.ones(*x.shape[:2], 1, dtype=torch.float64, requires_grad=True), list[Tensor]()
    logps = x.log_softmax(-1).gather(-1, IDS)
    logps.register_hook(seen.append)
    x.register_hook(lambda gradient: [item.zero_() for item in seen] and None)
    (logps.square() * (scale * 2)).sum().backward()


BACKWARDS: dict[str, Callable[[Tensor], Any]] = named_cases("gradients", globals(), "x")


OFTEN = [*((name, None) for name in BACKWARDS), ("after a write", 1)]  # with 1, gradients are computed in chunks


@pytest.mark.parametrize(("name", "least"), only(OFTEN, list(product(BACKWARDS, (None, 1)))))
def test_gradients_through_deferred_tensors_are_exact(
    compiled: Compiled, name: str, least: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if least is not None:
        monkeypatch.setattr(steps, "MIN_NUMEL", least)
        monkeypatch.setattr(streamed, "_versions", {})
    assert_behaves(compiled, BACKWARDS[name])


def test_a_view_taken_before_a_write_is_readable_without_a_gradient(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only autograd can rebuild the view's history."""
    monkeypatch.setattr(steps, "MIN_NUMEL", 1)
    logits = compiled.deferred()
    last = logits[:, -1]
    logits.mul_(2)
    assert_same(last.detach() * 1, compiled.dense()[:, -1].detach() * 2)


@pytest.mark.parametrize("turn", [lambda x: x.transpose_(0, 1), lambda x: x.unsqueeze_(0), lambda x: x.swapaxes_(0, 1)])
@pytest.mark.parametrize("writes_to_view", [True, False])
def test_writing_after_an_in_place_transpose_raises(compiled: Compiled, turn: Callable[..., Any], writes_to_view: bool) -> None:
    """For the gradient of an earlier view, autograd would view the transposed base again."""
    logits = compiled.deferred()
    part = logits[:, 1:]
    turn(logits)
    with pytest.raises(streamfx.TransposedOutputError, match="shape was changed in place"):
        (part if writes_to_view else logits).mul_(0.5)
    (logits * 2.0).sum().backward()


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "streambp"])
def test_a_deferred_tensor_may_enter_another_compiled_function(compiled: Compiled, backend: str) -> None:
    def consumer(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return F.cross_entropy(x.transpose(1, 2) * 2, IDS[..., 0]), x.detach()[:, 0], x.argmax(-1)

    function = torch.compile(consumer, backend=backend, fullgraph=True)

    def use(x: Tensor) -> tuple[Tensor, ...]:
        loss, *others = function(x)
        loss.backward()
        return loss.detach(), *(other * 1 for other in others)

    assert_behaves(compiled, use)


@pytest.mark.parametrize("rows", [lambda x: x[:, -1], lambda x: x, lambda x: x.split(4, 1)[1]], ids=["last", "all", "split"])
def test_gradients_are_exact_if_they_cannot_be_chunked(rows: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """As after many graphs in one process, or where a gradient does not stream: autograd is given plain tensors all the same."""
    monkeypatch.setattr(steps, "MIN_NUMEL", 8)
    monkeypatch.setattr(deferred, "compute_gradients_in_chunks", lambda source, gradient: None)
    results = []
    for lazily in (True, False):
        model = decoder(HEADS["bias"][0])
        function = torch.compile(model, backend="streambp", options=OPTIONS) if lazily else model
        ids = torch.arange(240).reshape(4, 60) * 7 % VOCABULARY  # the head's input is small compared to the logits
        loss = rows(function(ids)).logsumexp(-1).sum()
        loss.backward()
        results.append([loss.detach(), gradients(model)])
    assert_same(results[0], results[1])


@pytest.mark.parametrize("first", ["head.bias", "head.weight"])
def test_a_second_backward_over_other_nodes_is_exact(first: str) -> None:
    """The first has freed nothing that the second needs, so eager allows it."""
    parts = {"embed": nn.Embedding(30, 8), "head": nn.Linear(8, 30), "low": nn.Linear(8, 2), "high": nn.Linear(2, 30)}
    model = nn.ModuleDict(parts).double()
    ids, wanted = torch.randint(0, 30, (2, 12)), torch.randn(2, 12, 30, dtype=torch.float64)

    def logits(ids: Tensor) -> Tensor:
        x = model["embed"](ids).tanh()
        return model["head"](x) + model["high"](model["low"](x))  # type: ignore[no-any-return]

    def found(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        made, others = run(ids), [model.get_parameter(f"{name}.weight") for name in ("low", "high")]
        earlier = torch.autograd.grad(made, [model.get_parameter(first)], wanted)
        return [*earlier, *torch.autograd.grad(made, others, wanted)]

    compiled = torch.compile(logits, backend="streambp", options={"outputs": "lazy", "bodies": "eager"})
    torch.testing.assert_close(found(compiled), found(logits), rtol=1e-12, atol=1e-12)
