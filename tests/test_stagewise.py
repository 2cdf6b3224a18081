"""Gradients stage by stage: autograd has them between two stages of the backward half, and nothing else is different."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from streamfx.runtime import stagewise
from tests.support.stages import Layers, Staged, batch, hooked, noted_loops
from tests.support.twins import same_gradients


@pytest.fixture(scope="module")
def staged_once() -> Staged:
    torch.manual_seed(0)
    return Staged(Layers(), *batch())


@pytest.fixture
def staged(staged_once: Staged) -> Iterator[Staged]:
    yield staged_once
    staged_once.reset()


# -- when they come


def order_of(staged: Staged, step: Callable[[], Any]) -> list[str]:
    """Loops, and the parameters whose gradients are complete, in the order of a step."""
    order: list[str] = []
    names: dict[Tensor, str] = {parameter: name for name, parameter in staged.model.named_parameters()}
    with noted_loops(order), hooked(list(names), lambda parameter: order.append(names[parameter])):
        step()
    return order


def runs_left() -> int:
    """Backward passes that somebody holds values of."""
    return sum(type(item) is stagewise._Run for item in gc.get_objects())


def test_gradients_are_complete_between_loops(staged: Staged) -> None:
    loss = staged(*batch(1))
    order = order_of(staged, loss.backward)
    loops = [name for name in order if "backward" in name]
    assert sorted(set(order) - set(loops)) == sorted(name for name, _ in staged.model.named_parameters())
    assert order.index("head.weight") < order.index(loops[0])
    first_of_layer_0 = order.index(loops[len(loops) // 2])
    for name in ("out.1.weight", "out.1.bias", "qkv.1.weight", "qkv.1.bias"):
        assert order.index(name) < first_of_layer_0, order
    assert order.index("embed.weight") > order.index(loops[-1])


def test_at_once_all_loops_come_first(staged: Staged) -> None:
    staged.chain.always = False
    loss = staged(*batch(1))
    order = order_of(staged, loss.backward)
    loops = [name for name in order if "backward" in name]
    assert order[: len(loops)] == loops


def test_only_what_is_asked_for_runs(staged: Staged) -> None:
    for name, runs in (("head.weight", 0), ("qkv.1.weight", 2), ("embed.weight", 4)):
        found: list[str] = []
        with noted_loops(found):
            (own,) = torch.autograd.grad(staged(*batch(1)), [staged.model.get_parameter(name)])
        (truth,) = torch.autograd.grad(staged.eager(*batch(1)), [staged.eager.get_parameter(name)])
        torch.testing.assert_close(own, truth, rtol=1e-12, atol=1e-14)
        assert sum("backward" in loop for loop in found) == runs, found
    assert not runs_left()


# -- nothing else is different


def twice_retained(call: Any) -> None:
    loss = call(*batch(1))
    loss.backward(retain_graph=True)
    loss.backward()


def two_calls(call: Any) -> None:
    (2 * call(*batch(1)) + call(*batch(2))).backward()


def accumulated(call: Any) -> None:
    for seed in range(3):
        call(*batch(seed)).backward()


def some_inputs(call: Any) -> None:
    model = call.model if isinstance(call, Staged) else call
    call(*batch(1)).backward(inputs=[model.get_parameter("out.0.bias"), model.get_parameter("head.weight")])


def looked_at_for_nan(call: Any) -> None:
    with torch.autograd.set_detect_anomaly(True):
        call(*batch(1)).backward()


def saved_on_the_host(call: Any) -> None:
    with torch.autograd.graph.save_on_cpu():
        loss = call(*batch(1))
    loss.backward()


def checkpointed(call: Any, reentrant: bool = False) -> None:
    one = torch.ones((), dtype=torch.float64, requires_grad=True)
    checkpoint(lambda x: x * call(*batch(1)), one, use_reentrant=reentrant).backward()  # type: ignore[no-untyped-call]


def checkpointed_reentrant(call: Any) -> None:
    checkpointed(call, reentrant=True)


def scaled_by_hooks(call: Any) -> None:
    model = call.model if isinstance(call, Staged) else call
    handles = [parameter.register_hook(lambda gradient: 2 * gradient) for parameter in model.parameters()]
    call(*batch(1)).backward()
    for handle in handles:
        handle.remove()


STEPS = [
    twice_retained,
    two_calls,
    accumulated,
    some_inputs,
    looked_at_for_nan,
    saved_on_the_host,
    checkpointed,
    checkpointed_reentrant,
    scaled_by_hooks,
]


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("step", STEPS)
def test_as_in_eager(staged: Staged, step: Callable[[Any], None]) -> None:
    staged.both(step)
    assert staged.chain.is_used


@pytest.mark.parametrize("first", [True, False])
def test_a_call_that_is_repeated_may_decide_otherwise(staged: Staged, first: bool) -> None:
    """What was saved comes from a second forward run: whether that was chained does not say where gradients go."""

    def step(call: Any) -> None:
        one = torch.ones((), dtype=torch.float64, requires_grad=True)
        staged.chain.always = first
        loss: Tensor = checkpoint(lambda x: x * call(*batch(1)), one, use_reentrant=False)  # type: ignore[no-untyped-call]
        staged.chain.always = not first
        loss.backward()

    staged.both(step)


def test_second_derivatives_are_refused(staged: Staged) -> None:
    loss = staged(*batch(1))
    for name in ("head.weight", "embed.weight"):
        (gradient,) = torch.autograd.grad(loss, [staged.model.get_parameter(name)], create_graph=True)
        with pytest.raises(RuntimeError, match="double backward"):
            gradient.sum().backward()


def test_stages_run_without_autocast() -> None:
    """As AOTAutograd runs a half that was traced under autocast: its type casts are in the graph."""
    found: list[bool] = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        staged = Staged(Layers(1), *batch())
        loss = staged(*batch(1))
        with noted_loops(found, lambda _: torch.is_autocast_enabled("cpu")):
            loss.backward()
    assert found and not any(found)
    staged.eager(*batch(1)).backward()
    same_gradients(staged.model, staged.eager)


def test_a_step_inside_of_a_hook(staged: Staged) -> None:
    found: list[Any] = []

    def again(parameter: Tensor) -> None:
        with torch.enable_grad():
            found.append(torch.autograd.grad(staged(*batch(2)), list(staged.model.parameters())))

    loss = staged(*batch(1))
    with hooked([staged.model.get_parameter("out.1.weight")], again):
        loss.backward()
    staged.eager(*batch(1)).backward()
    same_gradients(staged.model, staged.eager)
    truth = torch.autograd.grad(staged.eager(*batch(2)), list(staged.eager.parameters()))
    torch.testing.assert_close(found[0], truth, rtol=1e-11, atol=1e-13)


def test_threads(staged: Staged) -> None:
    """Several calls at once, and several backward passes of one call."""
    shared, found = staged(*batch(9)), dict[int, list[Any]]()

    def work(number: int) -> None:
        own = list(staged.model.parameters())
        found[number] = [torch.autograd.grad(staged(*batch(number)), own), torch.autograd.grad(shared, own, retain_graph=True)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    weights = list(staged.eager.parameters())
    for number in range(3):
        for gradients, seed in zip(found[number], (number, 9), strict=True):
            truth = torch.autograd.grad(staged.eager(*batch(seed)), weights)
            torch.testing.assert_close(gradients, truth, rtol=1e-11, atol=1e-13)


def test_an_error_in_a_hook_leaves_nothing_behind(staged: Staged) -> None:
    def fail(parameter: Tensor) -> None:
        raise ValueError("on purpose")

    loss = staged(*batch(1))
    with hooked([staged.model.get_parameter("out.1.weight")], fail), pytest.raises(ValueError, match="on purpose"):
        loss.backward()
    assert not runs_left()
    staged.model.zero_grad()
    staged.both(two_calls)


def test_autograd_takes_gradients_over(staged: Staged) -> None:
    """The memory that a stage makes a gradient in is that of `.grad`: nobody else holds it, so that it is not copied."""
    made: dict[Tensor, int] = {}
    parameters = list(staged.model.parameters())
    handles = [p.register_hook(lambda gradient, p=p: made.update({p: gradient.data_ptr()})) for p in parameters]  # type: ignore[misc]
    staged(*batch(1)).backward()
    for handle in handles:
        handle.remove()
    assert made == {p: p.grad.data_ptr() for p in parameters if p.grad is not None}


def test_a_hook_that_writes_to_another_parameter_is_an_error(staged: Staged) -> None:
    """As it is in eager: a stage that has not run yet needs what it was."""

    def spoil(parameter: Tensor) -> None:
        with torch.no_grad():
            staged.model.get_parameter("qkv.0.weight").mul_(2)

    loss = staged(*batch(1))
    with hooked([staged.model.get_parameter("out.1.weight")], spoil), pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()


# -- who waits for gradients


@pytest.mark.parametrize("waits", [None, "hook", "gradient hook", "gradients"])
def test_auto_looks_for_who_waits(staged: Staged, waits: str | None) -> None:
    staged.chain.always = False
    weight = staged.model.get_parameter("out.0.weight")
    handle = None
    if waits == "hook":
        handle = weight.register_post_accumulate_grad_hook(lambda parameter: None)
    elif waits == "gradient hook":
        handle = weight.register_hook(lambda gradient: None)
    elif waits == "gradients":
        weight.grad = torch.zeros_like(weight)
    loss = staged(*batch(1))  # whose node 2.11 takes apart with it
    node = loss.grad_fn
    if handle is not None:
        handle.remove()
    assert any(isinstance(edge, stagewise._IDENTITY) for edge, _ in node.next_functions) == (waits is not None)


def test_at_once_there_is_no_chain() -> None:
    staged = Staged(Layers(1), *batch(), gradients="at once")
    assert staged.chain is None
    staged.both(two_calls)


# -- what is not chained


class Odd(Layers):
    """A buffer and a weight are written, and a part of another weight is returned."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Tensor
        self.register_buffer("count", torch.zeros(3))
        self.code = nn.Parameter(torch.randn(8, 8))

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        loss = super().forward(ids, labels)
        self.count.add_(1.0)
        with torch.no_grad():
            self.code.mul_(0.9)
        return loss + (self.code * 2).sin().sum(), self.embed.weight[:3]


def odd(call: Any) -> None:
    loss, rows = call(*batch(1))
    (loss + rows.square().sum()).backward()


def test_inputs_that_are_returned_are_left_alone() -> None:
    staged = Staged(Odd(), *batch())
    staged.reset()  # it has run once
    kept_out = {staged.chain.sources[place].given for place in staged.chain.kept_out}
    names = {id(parameter): name for name, parameter in staged.model.named_parameters()}
    assert {names[id(staged._given[position])] for position in kept_out} == {"embed.weight", "code"}
    assert len(staged.chain.places) > 2
    assert staged(*batch(1))[1]._base is staged.model.get_parameter("embed.weight")
    staged.reset()
    staged.both(odd)
    staged.both(odd)


class Block(Layers):
    """Activations in and out."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return self.hidden(x)


@pytest.mark.parametrize("is_leaf", [True, False])
@pytest.mark.long
def test_activations_from_outside(is_leaf: bool) -> None:
    given = torch.randn(2, 13, 8, dtype=torch.float64, requires_grad=True)
    staged, found = Staged(Block(), given), list[Any]()

    def step(call: Any) -> None:
        x = given.detach().clone().requires_grad_()
        call(x if is_leaf else 2 * x).square().sum().backward()
        found.append(x.grad)

    staged.both(step)
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-13)
    assert 0 in staged.chain.places[-1], "the gradient of the activations is complete at the end"


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {"keep_every": 2},
        {"save": "inputs"},
        {"save": "products"},
        {"offload": "inputs"},
        {"offload": "attention"},
        {"accumulate": "same"},
        {"chunk_size": "auto", "memory_budget": "1GiB", "bodies": "eager"},
    ],
)
def test_options(options: dict[str, Any]) -> None:
    staged = Staged(Layers(3), *batch(), **options)
    for step in (twice_retained, two_calls):
        staged.both(step)
    assert len(staged.chain.places) >= 3 and staged.chain.is_used


@pytest.mark.long
@pytest.mark.parametrize("tied", [False, True])
def test_deferred_logits(tied: bool) -> None:
    """The head's gradient comes from outside, too."""

    class WithLogits(Layers):
        def forward(self, ids: Tensor, labels: Tensor) -> Any:
            logits = self.head(self.hidden(self.first(ids)))
            return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits

    def step(call: Any) -> None:
        loss, logits = call(*batch(1))
        (loss + logits.square().mean() + logits.logsumexp(-1).sum()).backward()

    staged = Staged(WithLogits(tied=tied), *batch(), outputs="lazy")
    staged.both(step)
    staged.both(step)


@pytest.mark.long
def test_a_graph_without_a_sequence() -> None:
    """It runs as AOTAutograd has it; products are its stages."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))
    x = torch.randn(6, dtype=torch.float64)
    staged = Staged(model, x)
    assert staged.program is None and len(staged.chain.places) >= 4
    staged.both(lambda call: call(x).sum().backward())
