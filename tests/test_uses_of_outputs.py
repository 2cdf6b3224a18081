"""A loss, or a metric, on the logits that a compiled model returned: exact, and without a tensor as large as they are."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from streamfx import StaleOutputError
from streamfx.lazy import steps, streamed
from streamfx.lazy.deferred import DeferredTensor
from tests.support.spread import only
from tests.support.uses import STREAMED, WHOLE, Loss, entropy, token_logps

VOCABULARY, WIDTH = 3000, 8
OPTIONS: dict[str, Any] = {"chunk_size": 8, "loss_chunk_size": 8}


@pytest.fixture(autouse=True)
def small_values_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "LEAST", 50_000)
    monkeypatch.setattr(streamed, "_forms", {})


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embedding(ids)
        query, key, value = self.qkv(x)[:, None].chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True)[:, 0])
        return 3.0 * torch.tanh(self.head(F.layer_norm(x, (WIDTH,))) / 3.0)


def model() -> Model:
    torch.manual_seed(0)
    return Model().double()


def some_ids(length: int = 36) -> Tensor:
    return torch.randint(0, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(length))


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """The number of elements of the largest plain tensor that an operator makes."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [item for item in pytree.tree_leaves(result) if type(item) is Tensor]
        sizes = [item.untyped_storage().nbytes() // item.element_size() for item in made]
        self.numel = max(self.numel, *sizes, 0)
        return result


def results(function: Callable[[Tensor], Tensor], network: nn.Module, loss: Loss, ids: Tensor) -> tuple[list[Tensor], int]:
    """The loss and all gradients, and how large the largest tensor was that the loss and its gradient took."""
    network.zero_grad()
    logits = function(ids)
    with Largest() as largest:
        value = loss(logits, ids)
        value.backward()
    gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in network.parameters()]
    return [value.detach() * 1, *(gradient.clone() for gradient in gradients)], largest.numel


def assert_close(ours: list[Tensor], theirs: list[Tensor], *, tolerance: float = 1e-12) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() <= tolerance * b.norm()


@pytest.mark.parametrize("name", [*STREAMED, *WHOLE])
def test_losses_are_exact(name: str) -> None:
    network, ids, loss = model(), some_ids(), {**STREAMED, **WHOLE}[name]
    ours, largest = results(torch.compile(network, backend="streambp", options=OPTIONS), network, loss, ids)
    theirs, _ = results(network, network, loss, ids)
    assert_close(ours, theirs)
    if name in STREAMED and not (torch.__version__ < "2.13" and name in ("top-k", "maximum")):  # 2.11 makes zeros of no operand
        assert largest < ids.numel() * VOCABULARY // 2


@pytest.mark.parametrize("name", only(["Trainer's smoothing"], ["Trainer's smoothing", "DPO"]))
def test_lengths_that_change_share_two_forms(name: str) -> None:
    """The first length has a form of its own, the second one a form for all: in evaluation and in training."""
    network, loss = model(), STREAMED[name]
    compiled = torch.compile(network, backend="streambp", options=OPTIONS)
    for length in (36, 44, 29, 52, 61):
        ours, largest = results(compiled, network, loss, some_ids(length))
        assert_close(ours, results(network, network, loss, some_ids(length))[0])
        assert largest < 2 * length * VOCABULARY // 2
    assert all(len(forms) <= 2 for forms in streamed._forms.values())


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "grad": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


def metrics(logits: Tensor, ids: Tensor) -> list[Tensor]:
    return [
        (logits.argmax(-1) == ids).double().mean(),
        entropy(logits),
        token_logps(logits[:, :-1], ids[:, 1:]),
        logits.float().logsumexp(-1),
        *logits.topk(5, -1),
        logits[:, -3:].softmax(-1).amax(-1),
    ]


@pytest.mark.parametrize("mode", MODES)
def test_metrics(mode: str) -> None:
    network, ids = model(), some_ids()
    with MODES[mode]():
        logits, dense = torch.compile(network, backend="streambp", options=OPTIONS)(ids), network(ids)
        assert isinstance(logits, DeferredTensor)
        with Largest() as largest:
            ours = metrics(logits, ids)
        theirs = metrics(dense, ids)
    with torch.no_grad():
        for a, b in zip(ours, theirs, strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a * 1, b * 1, rtol=1e-6 if a.dtype == torch.float32 else 1e-12, atol=0)
    assert largest.numel < ids.numel() * VOCABULARY // 2


def test_a_teacher_of_the_same_kind() -> None:
    """Logits of two compiled models meet in one loss, outside of both."""
    student, teacher, ids = model(), model().requires_grad_(False), some_ids()
    with torch.no_grad():
        teacher.head.weight.mul_(1.5)

    def loss(logits: Tensor, others: Tensor) -> Tensor:
        return F.kl_div(logits.log_softmax(-1), others.log_softmax(-1), log_target=True, reduction="batchmean")

    compiled = [torch.compile(network, backend="streambp", options=OPTIONS) for network in (student, teacher)]
    others = compiled[1](ids), teacher(ids)
    ours, largest = results(compiled[0], student, lambda logits, ids: loss(logits, others[0]), ids)
    theirs, _ = results(student, student, lambda logits, ids: loss(logits, others[1]), ids)
    assert_close(ours, theirs)
    assert largest < ids.numel() * VOCABULARY // 2


def test_a_parameter_that_scales_the_logits() -> None:
    network, ids = model(), some_ids()
    compiled = torch.compile(network, backend="streambp", options=OPTIONS)
    found = []
    for function in (compiled, network):
        scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)

        def loss(logits: Tensor, ids: Tensor, scale: Tensor = scale) -> Tensor:
            return F.cross_entropy((logits * scale).flatten(0, 1), ids.flatten())

        made, largest = results(function, network, loss, ids)
        assert scale.grad is not None
        found.append([*made, scale.grad])
        assert function is network or largest < ids.numel() * VOCABULARY // 2
    assert_close(*found)


def test_autocast_inside_of_the_model_and_outside() -> None:
    network, ids = Model(), some_ids()
    found = []
    for outputs in ("lazy", "dense"):
        torch._dynamo.reset()
        compiled = torch.compile(network, backend="streambp", options={**OPTIONS, "outputs": outputs})
        with torch.autocast("cpu", torch.bfloat16):
            made, _ = results(compiled, network, STREAMED["cross entropy, shifted"], ids)
        found.append(made)
    assert_close(*found, tolerance=2e-2)
    assert (found[0][0] - found[1][0]).abs() <= 1e-3 * found[1][0]


# -- as plain tensors would


def lazy_and_dense() -> list[tuple[Model, Tensor]]:
    network, ids = model(), some_ids()
    return [(network, torch.compile(network, backend="streambp", options=OPTIONS)(ids)), (network, network(ids))]


@torch.no_grad()
def written_operands(logits: Tensor) -> Tensor:
    weights = torch.arange(VOCABULARY, dtype=torch.float64)
    weighted = logits * weights
    weights.zero_()
    return weighted.sum(-1)


@torch.no_grad()
def written_logits(logits: Tensor) -> Tensor:
    waiting, part = logits.exp(), logits[:, 2]
    logits.mul_(2.0)
    return torch.cat([waiting.sum(-1), part[:, :5], logits.sum(-1)], 1)


@torch.no_grad()
def written_before_any_use(logits: Tensor) -> Tensor:
    part, whole = logits[:, 2], logits.view(-1, VOCABULARY)
    logits.mul_(2.0).add_(logits)
    first = whole.amax(-1)
    logits.sub_(logits.amax(-1, keepdim=True))
    return torch.cat([first, whole.amax(-1), part.sum(-1)])


@torch.no_grad()
def written_with_a_view_of_itself(logits: Tensor) -> Tensor:
    logits.add_(logits.flip(0)).mul_(logits.detach())
    return logits.sum(-1)


@torch.no_grad()
def written_views(logits: Tensor) -> Tensor:
    maximum = logits.view(-1, VOCABULARY).amax(-1)
    logits[:, 0].zero_()
    return torch.cat([maximum, logits.view(-1, VOCABULARY).amax(-1)])


@pytest.mark.parametrize(
    "function", [written_operands, written_logits, written_views, written_before_any_use, written_with_a_view_of_itself]
)
def test_writes_are_seen_as_by_plain_tensors(function: Callable[[Tensor], Tensor]) -> None:
    (_, ours), (_, theirs) = lazy_and_dense()
    torch.testing.assert_close(function(ours), function(theirs), rtol=1e-12, atol=1e-12)


def test_two_backward_passes() -> None:
    found = []
    for network, logits in lazy_and_dense():
        network.zero_grad()
        value = token_logps(logits, some_ids()).sum() + logits.logsumexp(-1).mean()
        value.backward(retain_graph=True)
        value.backward()
        found.append([p.grad.clone() for p in network.parameters() if p.grad is not None])
    assert_close(*found)


def test_a_gradient_with_a_history_keeps_it() -> None:
    found = []
    for _, logits in lazy_and_dense():
        scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
        logps = logits.gather(-1, some_ids()[..., None])
        (gradient,) = torch.autograd.grad((scale * logps).square().sum(), logits, create_graph=True)
        found.append(list(torch.autograd.grad(gradient.sum(), scale)))
    assert_close(*found)


def test_hooks_and_kept_gradients() -> None:
    found = []
    for network, logits in lazy_and_dense():
        network.zero_grad()
        logits.retain_grad()
        logits.register_hook(lambda gradient: 2 * gradient)
        F.cross_entropy(logits.flatten(0, 1), some_ids().flatten()).backward()
        assert logits.grad is not None
        found.append([logits.grad * 1, *(p.grad.clone() for p in network.parameters() if p.grad is not None)])
    assert_close(*found)


def test_a_gradient_may_be_written_to_once_it_was_used() -> None:
    """One gradient goes to two uses; the one that comes later has a hook that empties it."""
    found = []
    for network, logits in lazy_and_dense():
        network.zero_grad()
        scale = torch.ones(2, 36, 1, dtype=torch.float64, requires_grad=True)
        emptied = scale * 2
        logps = logits.log_softmax(-1).gather(-1, some_ids()[..., None])
        seen: list[Tensor] = []
        logps.register_hook(seen.append)
        logits.register_hook(lambda gradient, seen=seen: [item.zero_() for item in seen] and None)
        (logps.square() * emptied).sum().backward()
        found.append([p.grad.clone() for p in network.parameters() if p.grad is not None])
    assert_close(*found)


def test_modes_of_the_user_see_operators() -> None:
    network, ids = model(), some_ids()
    compiled = torch.compile(network, backend="streambp", options=OPTIONS)
    counts = []
    for function in (compiled, network):
        logits = function(ids)
        with FlopCounterMode(display=False) as flops:
            (logits.argmax(-1), F.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward())
        counts.append(flops.get_total_flops())
    assert counts[0] >= 2 * 2 * ids.numel() * WIDTH * VOCABULARY  # the logits, twice
    logits = compiled(ids)
    with FlopCounterMode(display=False):  # and where they are made whole
        assert (logits.flip(1).argmax(-1) == network(ids).flip(1).argmax(-1)).all()


def test_a_changed_weight_is_noticed() -> None:
    network, ids = model(), some_ids()
    logits = torch.compile(network, backend="streambp", options=OPTIONS)(ids)
    value = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
    with torch.no_grad():
        network.head.weight.mul_(1.0)
    with pytest.raises(StaleOutputError, match=r"head.weight was changed in place since the call"):
        value.backward()


def test_nothing_is_kept_after_the_last_reference() -> None:
    """Neither the expression nor what it was made from: not by what was compiled for it, either."""
    network, ids = model(), some_ids()
    gc.disable()
    try:
        logits = torch.compile(network, backend="streambp", options=OPTIONS)(ids)
        hidden = logits._cell.source.current()
        value = token_logps(logits, ids).sum() + logits.logsumexp(-1).mean()
        references = [weakref.ref(item) for item in (logits._cell, logits._cell.source)]
        memory = [item.untyped_storage()._weak_ref() for item in hidden if isinstance(item, Tensor) and item.dim() == 3]
        value.backward()
        del logits, value, hidden
        assert all(reference() is None for reference in references)
        assert len(memory) == 1
        assert torch.UntypedStorage._expired(memory[0])  # type: ignore[attr-defined]
    finally:
        gc.enable()


def test_programs_that_never_repeat_are_not_compiled_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed, "MOST_GRAPHS", 3)
    network, ids = model(), some_ids()
    compiled = torch.compile(network, backend="streambp", options=OPTIONS)
    for temperature in (0.5, 0.6, 0.7):

        def loss(logits: Tensor, ids: Tensor, temperature: float = temperature) -> Tensor:
            return F.cross_entropy(torch.pow(logits.square(), temperature).flatten(0, 1), ids.flatten())

        assert_close(results(compiled, network, loss, ids)[0], results(network, network, loss, ids)[0])
    assert len(streamed._forms) == 3
