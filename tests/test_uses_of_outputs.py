"""What people do with logits that a compiled model returned: exact, without a tensor as large as they are, and in agreement.

A product rounds in another way where it has another number of rows. The loops that make such logits for a value, for its
gradient, for a few rows or as a whole all cut them alike: so a maximum is found again among the logits that it is one of.
"""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from streamfx.lazy import steps, streamed
from streamfx.lazy.deferred import DeferredTensor
from tests.support.tables import named_cases

pytestmark = pytest.mark.compiled

VOCABULARY, WIDTH, LENGTH = 1500, 16, 37
OPTIONS: dict[str, Any] = {"chunk_size": 8, "loss_chunk_size": 5}
Loss = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def small_values_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "MIN_NUMEL", 50_000)
    monkeypatch.setattr(streamed, "_versions", {})


class Model(nn.Module):
    """A decoder that returns logits, and optionally a function of them."""

    def __init__(self, beside: Callable[[Tensor], Any] | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.mix, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.beside = beside

    def forward(self, ids: Tensor) -> Any:
        x = self.embedding(ids)
        x = x + F.scaled_dot_product_attention(x[:, None], x[:, None], self.mix(x)[:, None], is_causal=True)[:, 0]
        logits = self.head(F.layer_norm(x, (WIDTH,)))
        return logits if self.beside is None else (logits, self.beside(logits))


def made(beside: Callable[[Tensor], Any] | None = None) -> tuple[Model, Any]:
    torch.manual_seed(0)
    model = Model(beside).double()
    return model, torch.compile(model, backend="streambp", options=OPTIONS)


def some_ids(length: int = LENGTH) -> Tensor:
    return torch.randint(0, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(length))


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """The number of elements of the largest plain tensor that an operator makes."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        plain = [item for item in pytree.tree_leaves(result) if type(item) is Tensor]
        self.numel = max(self.numel, *(item.untyped_storage().nbytes() // item.element_size() for item in plain), 0)
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


def assert_close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() <= 1e-12 * b.norm()


# -- losses and metrics


def token_logps(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)


def clipped(logits: Tensor, ids: Tensor) -> Tensor:
    logps = token_logps(logits, ids)
    ratio = (logps - logps.detach()).exp()
    return -torch.min(2.0 * ratio, 2.0 * ratio.clamp(0.8, 1.2)).mean()


def kth(logits: Tensor, k: int = 50) -> Tensor:
    return logits.topk(k).values[..., -1:]


# losses, and whether they stream
LOSSES: dict[str, tuple[Loss, bool]] = named_cases("losses", globals())


@pytest.mark.parametrize("name", LOSSES)
def test_losses_on_deferred_logits_are_exact(name: str) -> None:
    (network, compiled), ids, (loss, streams) = made(), some_ids(), LOSSES[name]
    ours, largest = results(compiled, network, loss, ids)
    assert_close(ours, results(network, network, loss, ids)[0])
    assert not streams or largest < ids.numel() * VOCABULARY // 2


def test_all_lengths_share_two_compiled_forms() -> None:
    """The first length has a form of its own, the second one a form for all: in evaluation and in training."""
    network, compiled = made()
    for length in (36, 44, 29, 52):
        ours, largest = results(compiled, network, clipped, some_ids(length))
        assert_close(ours, results(network, network, clipped, some_ids(length))[0])
        assert largest < 2 * length * VOCABULARY // 2
    assert all(len(forms) <= 2 for forms in streamed._versions.values())


# -- as plain tensors would


def test_nothing_is_kept_after_the_last_reference() -> None:
    """Neither the expression nor its inputs stay alive, and compiled code does not hold them."""
    (_, compiled), ids = made(), some_ids()
    gc.disable()
    try:
        logits = compiled(ids)
        hidden = logits._cell.source.checked_values()
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


# -- in agreement with themselves


def logits_of(beside: Callable[[Tensor], Any] | None = None) -> tuple[Model, Any]:
    model, compiled = made(beside)
    return model, compiled(some_ids())


# comparisons; each gives a mask with a known number of hits per token
HITS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = named_cases("hits", globals())


@torch.no_grad()
@pytest.mark.parametrize("name", HITS)
def test_maxima_are_found_among_their_logits(name: str) -> None:
    hits, count = HITS[name]
    _, logits = logits_of()
    assert isinstance(logits, DeferredTensor)
    found = hits(logits).sum(-1)
    source = logits._cell.source
    assert source is not None
    assert source.chunking.in_chunks
    assert (found == count).all(), (found != count).sum()


@torch.no_grad()
def test_column_maxima_are_found_among_their_logits() -> None:
    """The largest of each column: sequences could be chunks, in which products have other numbers of rows."""
    _, logits = logits_of()
    assert ((logits == logits.amax(1, keepdim=True)).sum(1) == 1).all()


RETURNED: dict[str, Callable[[Tensor], Any]] = {
    "maxima": lambda x: x.amax(-1),
    "the largest of one row": lambda x: x[:1, -1].topk(5).values[:, -1].sum(),
}


@pytest.mark.parametrize("name", RETURNED)
def test_returned_maxima_are_found_among_their_logits(name: str) -> None:
    """The result was rounded with the rows of a loop, so the logits have to be, too."""
    _, (logits, result) = logits_of(RETURNED[name])
    assert not isinstance(logits, DeferredTensor)
    assert (RETURNED[name](logits) == result).all()


def test_a_returned_loss_leaves_logits_deferred() -> None:
    _, (logits, _) = logits_of(lambda logits: F.cross_entropy(logits.flatten(0, 1), some_ids().flatten()))
    assert isinstance(logits, DeferredTensor)


@torch.no_grad()
def test_other_modes_between_two_uses_change_no_logit() -> None:
    _, logits = logits_of()
    maxima = logits.amax(-1, keepdim=True)
    torch.set_num_threads(2)
    with torch.autocast("cpu", torch.bfloat16):
        assert ((logits == maxima).sum(-1) == 1).all()
    assert torch.get_num_threads() == 2
