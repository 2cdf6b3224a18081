"""What a compiled model returns lies in memory as eager's results do: code outside may view it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamfx import explain
from streamfx.runtime.loop import Loop
from streamfx.runtime.restride import is_marked
from tests.support import decoders
from tests.support.decoders.parts import loss_of
from tests.support.exactness import recorder
from tests.support.stretches import interpreted
from tests.support.twins import batch


class ReturnsHeads(decoders.Decoder):
    """Heads beside the loss: what loops stack is dense, and what eager returns is a transposed view, or lies as one."""

    attention = decoders.CausalHeads

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        x = self.hidden(self.embed(ids))
        heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
        return loss_of(self.head(x), labels), heads, x.permute(2, 0, 1), x.transpose(0, 1) * 2


def test_results_have_eagers_strides() -> None:
    model = decoders.made(ReturnsHeads)
    inputs = batch()
    wanted = model(**inputs)
    for own, eager in zip(torch.compile(model, backend="streambp", options={"chunk_size": 5})(**inputs), wanted, strict=True):
        torch.testing.assert_close(own, eager)
        assert own.stride() == eager.stride()


class Shows(nn.Module):
    """Spelled-out attention whose probabilities, some dropped out, are part of the result."""

    def __init__(self, of_rows: str) -> None:
        super().__init__()
        self.of_rows = of_rows
        self.q, self.k = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        shares = (self.q(x) @ self.k(x).transpose(1, 2)).masked_fill(hidden, -torch.inf).softmax(-1)
        if self.of_rows == "dropped out":
            shares = F.dropout(shares, 0.25)
        shown = shares.sort(1).values if self.of_rows == "sorted" else shares
        return (shares @ x).square().mean(), shown


@pytest.mark.parametrize("of_rows", ["as they are", "dropped out", "sorted"])
def test_shares_of_all_keys_are_returned_in_full(of_rows: str) -> None:
    """A chunk's rows see its own keys and those before; what is returned, or sorted along the rows, has all keys."""
    torch.manual_seed(0)
    model, x = Shows(of_rows).double(), torch.randn(2, 13, 4, dtype=torch.float64)
    wanted = model.eval()(x)[1] if of_rows != "dropped out" else Shows.forward(model, x)[1]
    _, shown = torch.compile(model, backend="streambp", options={"chunk_size": 4, "bodies": "eager"})(x)
    assert shown.shape == wanted.shape
    if of_rows == "dropped out":
        shown, wanted = shown * (wanted != 0), wanted * (shown != 0)  # what neither has drawn
    torch.testing.assert_close(shown, wanted)


VIEWS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, ...]]] = {  # of what is given and of what is returned beside them
    "half": lambda x, y: (y, y[:, y.shape[1] // 2 :]),
    "from the end": lambda x, y: (y, y.narrow(1, y.shape[1] - 5, 3)),
    "features": lambda x, y: (y, y[..., y.shape[1] // 9 :]),
    "turned": lambda x, y: (y, y[:, y.shape[1] // 2 :].mT),
    "a row": lambda x, y: (y, y[:, y.shape[1] // 2], y.flatten(0, 1)),
    "two parts": lambda x, y: (y[:, y.shape[1] // 2 :], y[:, y.shape[1] // 3 :]),
    "of an input": lambda x, y: (x[:, x.shape[1] // 2 :], x[..., x.shape[1] // 9 :]),
    "in numbers, of all rows": lambda x, y: (y, y.roll(2, 1), y.flatten(0, 1)[3:9], y.flatten(0, 1)[3:9].t(), y.flatten(0, 1)[3]),
    "of a product": lambda x, y: ((z := y @ torch.eye(4, dtype=y.dtype)), z[:, z.shape[1] // 2 :]),
    "real parts": lambda x, y: ((z := torch.view_as_complex(y.unflatten(-1, (2, 2)) * 2)), z.real[:, y.shape[1] // 2 :], y),
    "as real numbers": lambda x, y: ((z := torch.polar(y, y)), torch.view_as_real(z)[:, y.shape[1] // 2 :]),
    "conjugates": lambda x, y: ((z := torch.polar(y, y)), z.conj()[:, y.shape[1] // 2 :]),
    "bits": lambda x, y: ((z := x * 2), z.detach().view(torch.int64)[:, y.shape[1] // 2 :]),
    "part of an input, in numbers": lambda x, y: (x[:, : x.shape[1] - 3][0, 2:5], x.view(2, x.shape[1], 2, 2)[0, 3]),
    "of one sequence": lambda x, y: (y, y[:1, y.shape[1] // 2 :].expand(3, -1, -1)),
}


class ReturnsViews(nn.Module):
    def __init__(self, views: Callable[[Tensor, Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.views, self.up, self.down = views, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        q = self.up(x)[:, None]
        y = x + F.scaled_dot_product_attention(q, q, q, is_causal=True)[:, 0]
        return (self.down(y).square().mean(), *self.views(x, y))


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("with_gradients", [True, False])
def test_views_of_any_length_show_eagers_rows(name: str, with_gradients: bool) -> None:
    """AOTAutograd makes them again from where our results lie: their offset is asked for, which follows from the length."""
    torch.manual_seed(0)
    model = ReturnsViews(VIEWS[name]).double()
    compiled = torch.compile(model, backend="streambp", options={"chunk_size": 4, "bodies": "eager"}, dynamic=True)
    for length in (13, 11):
        given = torch.randn(2, length + 3, 4, dtype=torch.float64, requires_grad=with_gradients)
        found, wanted = ([*function(given[:, 3:])] for function in (compiled, model))
        torch.testing.assert_close(found, wanted)
        assert [item.stride() for item in found] == [item.stride() for item in wanted]
        if with_gradients:
            sums = (sum(item.abs().sin().sum() for item in items if item.requires_grad) for items in (found, wanted))
            made = (torch.autograd.grad(total, given)[0] for total in sums)
            torch.testing.assert_close(*made)


DETACHED: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, ...]]] = {  # results beside others that are cut off from autograd
    "a row": lambda x, y: (y[:, -1], y.detach()),
    "a row, behind": lambda x, y: (y.detach(), y[:, -1]),
    "all of it": lambda x, y: (y, y.detach()),
    "all of it, as a view": lambda x, y: (y.view(y.shape), y.detach()),
    "parts": lambda x, y: (y[:, -1], y[:, :4].detach(), y.detach()[:, 4:]),
    "turned": lambda x, y: (y.mT, y.flatten(0, 1), y.detach()),
    "data": lambda x, y: (y[:, -1], y.data),
    "several": lambda x, y: (y[:, -1], y[:, 0], y.detach(), y.data, y.detach().mT, y[:, 3:5].detach()),
    "detached alone": lambda x, y: (y.detach(), y.data, y.detach()[:, 1]),
    "of an input": lambda x, y: (x[:, -1], x.detach(), x.detach()[:, 2:]),
    "written": lambda x, y: ((z := y * 2)[:, -1], z.detach().add_(1), z.detach()),
    "of complex numbers": lambda x, y: ((z := torch.polar(y, y))[:, -1], z.detach(), z.real.detach()),
    "in blocks": lambda x, y: (y.unsqueeze(1), *y.detach().split([2, y.shape[1] - 2], 1)),
}


@pytest.mark.parametrize("name", DETACHED)
@pytest.mark.parametrize("dynamic", [False, True])
def test_detached_results_ask_for_no_gradients(name: str, dynamic: bool) -> None:
    """A view of a result that does would ask for them, too, and give no arrays."""
    torch.manual_seed(0)
    model = ReturnsViews(DETACHED[name]).double()
    compiled = torch.compile(model, backend="streambp", options={"chunk_size": 4, "bodies": "eager"}, dynamic=dynamic)
    given = torch.randn(2, 13, 4, dtype=torch.float64, requires_grad=True)
    found, wanted = compiled(given), model(given)
    assert [item.requires_grad for item in found] == [item.requires_grad for item in wanted]
    arrays = ([item.numpy() for item in items if not item.requires_grad] for items in (found, wanted))
    torch.testing.assert_close(*arrays)
    sums = (sum(item.abs().sin().sum() for item in items if item.requires_grad) for items in (found, wanted))
    torch.testing.assert_close(*(torch.autograd.grad(total, [given, *model.parameters()]) for total in sums))


@pytest.mark.parametrize("with_gradients", [True, False])
def test_a_view_of_memory_that_two_inputs_share_and_one_writes(with_gradients: bool) -> None:
    """AOTAutograd takes the memory for one input: what is returned is part of what was written into it."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 4).double()

    def function(a: Tensor, b: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        q = layer(x + b.transpose(0, 1))[:, None]
        y = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        a.mul_(2)
        return y.square().mean(), a[:, a.shape[1] // 2 :]

    compiled = torch.compile(function, backend="streambp", options={"chunk_size": 4, "bodies": "eager"}, dynamic=True)
    for length in (13, 11):
        memory, x = (torch.randn(2, length, 4, dtype=torch.float64) for _ in range(2))
        results = []
        for call in (compiled, function):
            own = memory.clone()
            with torch.set_grad_enabled(with_gradients):
                results.append([*call(own, own.transpose(0, 1), x), own])
        torch.testing.assert_close(*results)


class OfConjugates(nn.Module):
    """Takes a complex number's parts, and returns parts of one."""

    turn: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("turn", torch.polar(torch.ones(40, 4), torch.randn(40, 4)).to(torch.complex128).conj())

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        turn = self.turn[: z.shape[1]]
        x = z.real * turn.imag + z.imag * turn.real
        q = self.up(x)[:, None]
        y = x + F.scaled_dot_product_attention(q, q, q, is_causal=True)[:, 0]
        return self.down(y).sin(), y.tanh()


@pytest.mark.parametrize("compiler", [interpreted, pytest.param(nullcontext, marks=pytest.mark.long)])
def test_numbers_that_are_marked_as_conjugates(compiler: Callable[[], AbstractContextManager[object]]) -> None:
    """Inputs, buffers and gradients, with the mark and without: memory holds other numbers than they are."""
    torch.manual_seed(0)
    model = OfConjugates().double()
    compiled = torch.compile(model, backend="streambp", options={"chunk_size": 4, "bodies": "inductor"})
    with compiler():
        for mark in (torch.clone, torch.conj):
            given = torch.polar(*torch.randn(2, 2, 13, 4, dtype=torch.float64)).requires_grad_()
            results = []
            for function in (compiled, model):
                real, imaginary = function(mark(given))
                loss = torch.complex(real, imaginary).conj().imag.sin().sum()
                results.append([real, imaginary, *torch.autograd.grad(loss, [given, *model.parameters()])])
            torch.testing.assert_close(*results)


@pytest.mark.parametrize("number", [1 + 1j, 3j])
def test_a_complex_number_that_multiplies(number: complex) -> None:
    """Its conjugate multiplies the gradient: autograd marks a number, too."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 4).double()

    def function(x: Tensor) -> Tensor:
        q = layer(x)[:, None]
        y = F.scaled_dot_product_attention(q, q, q, is_causal=True)[:, 0]
        return (torch.view_as_complex(y.unflatten(-1, (2, 2))) * number).imag.sin().sum()

    compiled = torch.compile(function, backend="streambp", options={"chunk_size": 4, "bodies": "eager", "strict": True})
    given = torch.randn(2, 13, 4, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(*(torch.autograd.grad(call(given), [given, *layer.parameters()]) for call in (compiled, function)))


def test_gradients_that_are_marked_as_conjugates(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled of a loop's body reads memory: nothing that a loop is given may be marked."""
    forward = Loop.forward

    def looked_at(loop: Loop, *arguments: Any) -> tuple[Any, ...]:
        assert not any(is_marked(item) for item in arguments if isinstance(item, Tensor))
        return forward(loop, *arguments)

    monkeypatch.setattr(Loop, "forward", looked_at)
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 4).double(), torch.randn(2, 13, 4, dtype=torch.float64)

    def function(x: Tensor) -> Tensor:
        q = layer(x)[:, None]
        y = x + F.scaled_dot_product_attention(q, q, q, is_causal=True)[:, 0]
        return torch.polar(y.tanh(), y)

    compiled = torch.compile(function, backend="streambp", options={"chunk_size": 4, "bodies": "eager"})
    weights = torch.polar(*torch.randn(2, 2, 13, 4, dtype=torch.float64))
    found, wanted = (
        torch.autograd.grad((call(x).conj() * weights).sum().abs(), [*layer.parameters()]) for call in (compiled, function)
    )
    torch.testing.assert_close(found, wanted)


MARKED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a part of a buffer": lambda x, sine: sine[: x.shape[1], 1:],
    "memory that is read": lambda x, sine: x + sine.as_strided((x.shape[1], 4), (4, 2), 1),
    "a conjugate": lambda x, sine: torch.polar(x, x).conj(),
    "a negative": lambda x, sine: torch.polar(x, x).conj().imag[:, 3:],
}


@pytest.mark.parametrize("name", MARKED)
@pytest.mark.parametrize("with_gradients", [True, False])
def test_a_result_that_is_marked(name: str, with_gradients: bool) -> None:
    """The graph runs as it stood: code outside may ask for the mark, and AOTAutograd makes views of memory that others lie in."""
    torch.manual_seed(0)
    model = OfConjugates().double()
    sine = model.turn.imag

    def function(z: Tensor) -> tuple[Tensor, Tensor]:
        _, y = model(z)
        return y, MARKED[name](y, sine)

    backend = recorder(chunk_size=4)
    compiled = torch.compile(function, backend=backend, dynamic=True)
    for length in (13, 11):
        given = torch.polar(*torch.randn(2, 2, length, 4, dtype=torch.float64))
        with torch.set_grad_enabled(with_gradients):
            found, wanted = ([*call(given)] for call in (compiled, function))
        torch.testing.assert_close(found, wanted)
        assert [(item.is_conj(), item.is_neg()) for item in found] == [(item.is_conj(), item.is_neg()) for item in wanted]
    assert "resolve_conj()" in str(explain(function, given))
    assert all(facts.program is None and "resolve_conj()" in facts.reasons()[0] for facts in backend.facts)


SHARED: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {  # what is returned, and part of it
    "rows": lambda y: (y, y[:, y.shape[1] // 2 :]),
    "rows, first": lambda y: (y[:, y.shape[1] // 2 :], y),
    "detached": lambda y: (y, y.detach()),
    "turned": lambda y: (y, y.unflatten(-1, (2, 2)).transpose(1, 2)),
    "two parts": lambda y: (y[:, 3:], y[:, :-1]),
    "conjugates": lambda y: ((z := torch.polar(y, y)), z.conj()),
    "conjugates, part of each": lambda y: ((z := torch.polar(y, y)).conj()[:, 3:], z[:, :-1]),
    "negatives": lambda y: ((z := torch.polar(y, y)).imag, z.conj().imag),
    "two parts, turned": lambda y: (y[:, 1:].mT, y.expand(3, 2, -1, -1)),
}


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("dynamic", [False, True])
def test_results_that_share_memory_do_so(name: str, dynamic: bool) -> None:
    """Without gradients nobody makes views again: the caller's write into one shows in the other."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 4).double()

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        q = layer(x)[:, None]
        return SHARED[name](x + F.scaled_dot_product_attention(q, q, q, is_causal=True)[:, 0])

    compiled = torch.compile(function, backend="streambp", options={"chunk_size": 4, "bodies": "eager"}, dynamic=dynamic)
    with torch.no_grad():
        for length in (13, 11):
            x = torch.randn(2, length, 4, dtype=torch.float64)
            found, wanted = compiled(x), function(x)
            for results in (found, wanted):
                results[0][..., -2:, :] = 7.0
            torch.testing.assert_close(found, wanted)
