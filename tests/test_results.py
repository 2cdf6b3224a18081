"""What a compiled model returns lies in memory as eager's results do: code outside may view it."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamfx import explain
from streamfx.runtime.loop import Loop
from streamfx.runtime.restride import has_lazy_bit
from tests.support.exactness import recorder
from tests.support.spread import only
from tests.support.stretches import interpreted
from tests.support.tables import named_cases

pytestmark = pytest.mark.compiled

Views = Callable[[Tensor, Tensor], tuple[Tensor, ...]]  # returned views of an input and of a computed value


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    dynamic = options.pop("dynamic", None)
    return torch.compile(function, backend="streambp", options={"chunk_size": 4, "bodies": "eager", **options}, dynamic=dynamic)


def rows(length: int = 13, requires_grad: bool = False) -> Tensor:
    return torch.randn(2, length, 4, dtype=torch.float64, requires_grad=requires_grad)


def polar(length: int = 13) -> Tensor:
    return torch.polar(rows(length), rows(length))


def attended(layer: nn.Module, x: Tensor) -> Tensor:
    q = layer(x)[:, None]
    return x + F.scaled_dot_product_attention(q, q, q, is_causal=True)[:, 0]


def sums_of(results: Any) -> Any:
    return sum(item.abs().sin().sum() for item in results if item.requires_grad)


class Returns(nn.Module):
    """A loss and views."""

    def __init__(self, views: Views) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.views, self.up, self.down = views, nn.Linear(4, 4), nn.Linear(4, 4)
        self.double()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = attended(self.up, x)
        return (self.down(y).square().mean(), *self.views(x, y))


VIEWS: dict[str, Views] = named_cases("views", globals(), "x, y")
EVERY_VIEW = [("heads", True), ("half", True), ("half", False), ("parts", True)]


@pytest.mark.parametrize(("name", "with_gradients"), only(EVERY_VIEW, list(product(VIEWS, (True, False)))))
def test_returned_views_equal_eager_at_any_length(name: str, with_gradients: bool) -> None:
    """AOTAutograd rebuilds them from our results' storage: their offset depends on the length.

    What is detached asks for no gradients: a view of a result that does would ask for them, too, and give no arrays.
    """
    model = Returns(VIEWS[name])
    function = compiled(model, dynamic=True)
    for length in (13, 11):
        given = rows(length + 3, requires_grad=with_gradients)
        found, wanted = ([*call(given[:, 3:])] for call in (function, model))
        torch.testing.assert_close(found, wanted)
        assert [(item.stride(), item.requires_grad) for item in found] == [(item.stride(), item.requires_grad) for item in wanted]
        arrays = ([item.resolve_conj().numpy() for item in items if not item.requires_grad] for items in (found, wanted))
        torch.testing.assert_close(*arrays)
        if with_gradients:
            torch.testing.assert_close(*(torch.autograd.grad(sums_of(items), given)[0] for items in (found, wanted)))


SHARED: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = named_cases("shared", globals(), "y")


EVERY_TIME = [("rows", True), ("two parts, turned", False)]


@pytest.mark.parametrize(("name", "dynamic"), only(EVERY_TIME, list(product(SHARED, (True, False)))))
def test_results_share_memory_as_in_eager(name: str, dynamic: bool) -> None:
    """Without gradients AOTAutograd rebuilds no views: the caller's write into one result shows in the other."""
    layer = nn.Linear(4, 4).double()

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return SHARED[name](attended(layer, x))

    call = compiled(function, dynamic=dynamic)
    with torch.no_grad():
        for length in (13, 11):
            x = rows(length)
            found, wanted = call(x), function(x)
            for results in (found, wanted):
                results[0][..., -2:, :] = 7.0
            torch.testing.assert_close(found, wanted)


# -- numbers that are marked as conjugates or negatives: memory holds other numbers than they are


class OfConjugates(nn.Module):
    """Takes a complex number's parts, and returns parts of one."""

    turn: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        self.register_buffer("turn", torch.polar(torch.ones(40, 4), torch.randn(40, 4)).to(torch.complex128).conj())

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        turn = self.turn[: z.shape[1]]
        y = attended(self.up, z.real * turn.imag + z.imag * turn.real)
        return self.down(y).sin(), y.tanh()


def test_lazy_conjugates_are_exact() -> None:
    """Inputs, buffers and gradients, with the mark and without."""
    model = OfConjugates()
    function = compiled(model, bodies="inductor")
    with interpreted():
        for mark in (torch.clone, torch.conj):
            given, results = polar().requires_grad_(), []
            for call in (function, model):
                real, imaginary = call(mark(given))
                loss = torch.complex(real, imaginary).conj().imag.sin().sum()
                results.append([real, imaginary, *torch.autograd.grad(loss, [given, *model.parameters()])])
            torch.testing.assert_close(*results)


def test_loops_get_no_lazy_conjugates(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled of a loop's body reads memory: nothing that a loop is given may be marked."""
    forward = Loop.forward

    def looked_at(loop: Loop, *arguments: Any) -> tuple[Any, ...]:
        assert not any(has_lazy_bit(item) for item in arguments if isinstance(item, Tensor))
        return forward(loop, *arguments)

    monkeypatch.setattr(Loop, "forward", looked_at)
    layer, x, weights = nn.Linear(4, 4).double(), rows(), polar()

    def function(x: Tensor) -> Tensor:
        y = attended(layer, x)
        return torch.polar(y.tanh(), y)

    both = compiled(function), function
    sums = ((call(x).conj() * weights).sum().abs() for call in both)
    torch.testing.assert_close(*(torch.autograd.grad(total, [*layer.parameters()]) for total in sums))


MARKED: dict[str, Callable[[Tensor, Tensor], Tensor]] = named_cases("marked", globals(), "x, sine")


@pytest.mark.parametrize(("name", "with_gradients"), only([("a conjugate", False)], list(product(MARKED, (True, False)))))
def test_a_lazily_conjugated_result_falls_back(name: str, with_gradients: bool) -> None:
    """The graph runs as it stood: code outside may ask for the mark, and AOTAutograd makes views of memory that others lie in."""
    model = OfConjugates()
    sine = model.turn.imag

    def function(z: Tensor) -> tuple[Tensor, Tensor]:
        _, y = model(z)
        return y, MARKED[name](y, sine)

    backend = recorder(chunk_size=4)
    both = torch.compile(function, backend=backend, dynamic=True), function
    for length in (13, 11):
        given = polar(length)
        with torch.set_grad_enabled(with_gradients):
            found, wanted = ([*call(given)] for call in both)
        torch.testing.assert_close(found, wanted)
        assert [(item.is_conj(), item.is_neg()) for item in found] == [(item.is_conj(), item.is_neg()) for item in wanted]
    assert "resolve_conj()" in str(explain(function, given))
    assert all(facts.program is None and "resolve_conj()" in facts.reasons()[0] for facts in backend.facts)
