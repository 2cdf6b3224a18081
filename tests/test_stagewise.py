"""Gradients stage by stage, or at once: autograd has them between two stages, or at the end, and nothing else is different."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from streamfx.cost.meter import Meter
from streamfx.runtime import stagewise
from tests.support.stages import Layers, Staged, batch, descend, hooked, noted_loops
from tests.support.tables import named_cases


@pytest.fixture(scope="module")
def staged_once() -> Staged:
    torch.manual_seed(0)
    return Staged(Layers(), *batch())


@pytest.fixture
def staged(staged_once: Staged) -> Iterator[Staged]:
    yield staged_once
    staged_once.reset()


# -- when they come


def order_of(staged: Staged, step: Callable[[], Any]) -> tuple[list[str], list[str]]:
    """Loops and the parameters whose gradients are complete, in the order of a step; and the loops of the backward half alone."""
    order: list[str] = []
    names: dict[Tensor, str] = {parameter: name for name, parameter in staged.model.named_parameters()}
    with noted_loops(order), hooked(list(names), lambda parameter: order.append(names[parameter])):
        step()
    return order, [name for name in order if "backward" in name]


def runs_left() -> int:
    """Count backward runs that are still referenced."""
    return sum(type(item) is stagewise._Run for item in gc.get_objects())


@pytest.mark.compiled
def test_gradients_are_complete_between_loops(staged: Staged) -> None:
    order, loops = order_of(staged, staged(*batch(1)).backward)
    assert sorted(set(order) - set(loops)) == sorted(name for name, _ in staged.model.named_parameters())
    assert order.index("head.weight") < order.index(loops[0])
    first_of_layer_0 = order.index(loops[len(loops) // 2])
    for name in ("out.1.weight", "out.1.bias", "qkv.1.weight", "qkv.1.bias"):
        assert order.index(name) < first_of_layer_0, order
    assert order.index("embed.weight") > order.index(loops[-1])
    staged.reset()
    staged.chain.always = False
    order, loops = order_of(staged, staged(*batch(1)).backward)
    assert order[: len(loops)] == loops, "at once all loops come first"


def test_only_requested_gradients_are_computed(staged: Staged) -> None:
    for name, runs in (("head.weight", 0), ("qkv.1.weight", 2), ("embed.weight", 4)):
        found: list[str] = []
        with noted_loops(found):
            (own,) = torch.autograd.grad(staged(*batch(1)), [staged.model.get_parameter(name)])
        (truth,) = torch.autograd.grad(staged.eager(*batch(1)), [staged.eager.get_parameter(name)])
        torch.testing.assert_close(own, truth, rtol=1e-12, atol=1e-14)
        assert sum("backward" in loop for loop in found) == runs, found
    assert not runs_left()


# -- everything else is as in eager: steps, given a callable and its module


def twice_retained(call: Any, model: nn.Module) -> None:
    loss = call(*batch(1))
    loss.backward(retain_graph=True)
    loss.backward()


def saved_by_hooks(call: Any, model: nn.Module) -> None:
    """Hooks of saved tensors see each of ours once."""
    packed, unpacked = list[Tensor](), list[Tensor]()
    hooks = (lambda item: packed.append(item) or item.clone(), lambda item: unpacked.append(item) or item)  # type: ignore[func-returns-value]
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        loss = call(*batch(1))
    loss.backward()
    assert len(packed) == len(unpacked) > 0 or call is model


def decided_otherwise(call: Any, model: nn.Module) -> None:
    """Saved values come from a second forward; its chaining does not decide where gradients go."""
    one, chain = torch.ones((), dtype=torch.float64, requires_grad=True), getattr(call, "chain", None)
    loss: Tensor = checkpoint(lambda x: x * call(*batch(1)), one, use_reentrant=False)  # type: ignore[no-untyped-call]
    if chain is not None:
        chain.always = not chain.always
    loss.backward()


def with_hooks(call: Any, model: nn.Module) -> None:
    """Each hook of a parameter is called once, and its result is the gradient."""
    seen: list[Tensor] = []
    handles = [p.register_hook(lambda gradient, p=p: seen.append(p) or 2 * gradient) for p in model.parameters()]  # type: ignore[misc,func-returns-value]
    with hooked(list(model.parameters()), seen.append):
        call(*batch(1)).backward()
    for handle in handles:
        handle.remove()
    assert sorted(map(id, seen)) == sorted(map(id, [*model.parameters()] * 2))


STEPS: dict[str, Callable[[Any, nn.Module], Any]] = named_cases("steps", globals(), "call, model")


@pytest.mark.parametrize("stagewise", [True, False])
@pytest.mark.parametrize("name", STEPS)
def test_as_in_eager(staged: Staged, name: str, stagewise: bool) -> None:
    staged.chain.always = stagewise
    staged.both(STEPS[name])
    assert staged.chain.is_used or not stagewise


def test_second_derivatives_are_refused(staged: Staged) -> None:
    loss = staged(*batch(1))
    for name in ("head.weight", "embed.weight"):
        (gradient,) = torch.autograd.grad(loss, [staged.model.get_parameter(name)], create_graph=True)
        with pytest.raises(RuntimeError, match="double backward"):
            gradient.sum().backward()


def test_errors_of_hooks_release_everything(staged: Staged) -> None:
    """This includes a hook that writes to an input of a later stage, an error in eager, too."""

    def fail(parameter: Tensor) -> None:
        raise ValueError("on purpose")

    def spoil(parameter: Tensor) -> None:
        with torch.no_grad():
            staged.model.get_parameter("qkv.0.weight").mul_(2)

    for hook, error, text in ((fail, ValueError, "on purpose"), (spoil, RuntimeError, "inplace operation")):
        loss = staged(*batch(1))
        with hooked([staged.model.get_parameter("out.1.weight")], hook), pytest.raises(error, match=text):
            loss.backward()
        assert hook is spoil or not runs_left()
        staged.reset()
        staged.both(STEPS["two calls"])


WAITS: dict[str, Callable[[Any], Any]] = named_cases("waits", globals(), "weight")


@pytest.mark.parametrize("who", WAITS)
def test_auto_detects_consumers_of_gradients(staged: Staged, who: str) -> None:
    staged.chain.always = False
    remove = WAITS[who](staged.model.get_parameter("out.0.weight"))
    loss = staged(*batch(1))  # whose node 2.11 takes apart with it
    if remove is not None:
        remove()
    assert any(isinstance(edge, stagewise._IDENTITY) for edge, _ in loss.grad_fn.next_functions) == (who != "nobody")


class Odd(Layers):
    """A weight is written, and a part of another one is returned."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.randn(8, 8))

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        with torch.no_grad():
            self.code.mul_(0.9)
        return super().forward(ids, labels) + (self.code * 2).sin().sum(), self.embed.weight[:3]


@pytest.mark.compiled
def test_returned_or_written_inputs_are_excluded() -> None:
    staged = Staged(Odd(), *batch())
    staged.reset()  # it has run once
    excluded = {staged.chain.sources[place].input_index for place in staged.chain.unchained}
    names = {id(parameter): name for name, parameter in staged.model.named_parameters()}
    assert {names[id(staged._given[position])] for position in excluded} == {"embed.weight", "code"}
    assert len(staged.chain.released) > 2
    staged.both(lambda call, model: sum(part.square().sum() for part in call(*batch(1))).backward())


class Peeks(Layers):
    """The first layer reads a weight of the last one, of which it makes no gradient: it must not be updated before."""

    def first(self, ids: Tensor) -> Tensor:
        return nn.functional.linear(self.embed(ids), self.get_parameter("out.1.weight").detach()).sin()


@pytest.mark.compiled
def test_updates_equal_those_of_an_optimizer_after_backward() -> None:
    """Bit for bit."""
    staged, found = Staged(Peeks(tied=True), *batch()), []
    for in_backward in (True, False):
        staged.reset()
        staged.chain.always = in_backward
        parameters = list(staged.model.parameters())
        for seed in range(2):
            with hooked(parameters if in_backward else [], descend):
                staged(*batch(seed)).backward()
            for parameter in () if in_backward else parameters:
                descend(parameter)
        found.append([parameter.detach().clone() for parameter in parameters])
    assert all(map(torch.equal, *found))


@pytest.mark.compiled
def test_gradients_of_two_stages_are_live() -> None:
    """Of four layers; the optimizer in the backward pass frees each gradient, and so does adding it to one that is there."""
    staged = Staged(Layers(4, width=32), *batch())
    size = {name: parameter.numel() * 8 for name, parameter in staged.model.named_parameters()}
    layer = sum(of for name, of in size.items() if ".0." in name)

    def peak(stagewise: bool) -> int:
        staged.chain.always = stagewise
        loss = staged(*batch(1))
        with Meter() as meter:
            loss.backward()
        return meter.peak

    all_alive = peak(False)
    besides = all_alive - sum(size.values())
    assert peak(True) - besides <= 2 * layer, "added to gradients that are there"
    staged.model.zero_grad()
    with hooked(list(staged.model.parameters()), descend):
        assert peak(True) - besides <= 2 * layer
    assert all_alive - besides >= 4 * layer
