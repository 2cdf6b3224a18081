"""The linearity table agrees with the operators; gradients that are linear in a number per sequence come with the loss."""

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._decomp import decomposition_table
from torch.utils import _pytree as pytree

from streamfx.ir.facts import Facts
from streamfx.passes.ops.linearity import LINEAR, Linear, is_linear, preserves_scale
from tests.support.laws import Call
from tests.support.samples import SAMPLES, Sizes, calls, table_in
from tests.support.spread import only
from tests.support.tables import named_cases, read
from tests.support.tracing import compare_function, take_gradients, traced

aten = torch.ops.aten
SIZES = (Sizes(b=2, t=5, d=3, k=4, v=7), Sizes(b=3, t=3, d=3, k=3, v=3, seed=1), Sizes(b=2, t=1, d=2, k=1, v=3, seed=2))
DECOMPOSED = {target: decomposition_table[target] for target in (aten._fused_rms_norm_backward.default,)}  # no kernel on CPUs
OTHERS: dict[str, tuple[Any, ...]] = named_cases("others", globals())


MORE, _ = table_in("samples_of_linearity.txt")


def base_calls(target: Any, sizes: Sizes) -> Iterator[Call]:
    yield from calls(target, sizes, MORE) if target in MORE else ()
    yield from calls(target, sizes) if target in SAMPLES and target not in DECOMPOSED else ()


def as_node(call: Call) -> tuple[fx.Node, list[tuple[fx.Node, Tensor]]]:
    """The call as a node, and its tensors, where numbers that fill a tensor are seen as such."""
    graph, tensors = fx.Graph(), []

    def operand(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        if item.dim() == 0:
            node = graph.call_function(aten.full.default, ([], item.item()), {"dtype": item.dtype})
        else:
            node = graph.placeholder("x")
        node.meta["val"] = item
        tensors.append((node, item))
        return node

    args, kwargs = pytree.tree_map(operand, (call.args, dict(call.kwargs)))
    return graph.call_function(call.target, args, kwargs), tensors


def variants(call: Call) -> Iterator[Call]:
    """The call, and with each of its arguments given as something else."""
    yield call
    for position, argument in enumerate(call.target._schema.arguments):
        for other in OTHERS.get(str(argument.type), ()):
            if argument.kwarg_only:
                yield replace(call, kwargs={**call.kwargs, argument.name: other})
            elif position <= len(call.args):
                yield replace(call, args=(*call.args[:position], other, *call.args[position + 1 :]))


def runs(call: Call, chosen: dict[int, Tensor]) -> list[Tensor] | None:
    """The results with some of the tensors replaced; None where the operator does not take such arguments."""
    numbers = itertools.count()

    def operand(item: Any) -> Any:
        return chosen.get(next(numbers), item) if isinstance(item, Tensor) else item

    args, kwargs = pytree.tree_map(operand, (call.args, dict(call.kwargs)))
    try:
        made = DECOMPOSED.get(call.target, call.target)(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, AttributeError):
        return None
    return [item for item in pytree.tree_leaves(made) if isinstance(item, Tensor)]


def claims(call: Call) -> Iterator[tuple[int, ...]]:
    """Each floating-point tensor, each pair and all of them, if the table says that the call is linear in them."""
    node, tensors = as_node(call)
    floating = [i for i, (source, item) in enumerate(tensors) if item.is_floating_point() and source.op == "placeholder"]
    chosen = [*itertools.combinations(floating, 1), *itertools.combinations(floating, 2), tuple(floating)]
    choices = (choice for choice in dict.fromkeys(chosen) if choice)
    yield from (choice for choice in choices if is_linear(node, {tensors[i][0] for i in choice}))


def check(call: Call, choice: tuple[int, ...]) -> bool:
    """Homogeneous and additive: f(2.5 x - 0.75 y) = 2.5 f(x) - 0.75 f(y)."""
    torch.manual_seed(0)
    tensors = [item for item in pytree.tree_leaves((call.args, dict(call.kwargs))) if isinstance(item, Tensor)]
    x, y = ({i: torch.randn_like(tensors[i]) for i in choice} for _ in range(2))
    of_x, of_y, of_both = (runs(call, chosen) for chosen in (x, y, {i: 2.5 * x[i] - 0.75 * y[i] for i in choice}))
    if of_x is None or of_y is None or of_both is None:
        return False
    rounds = any(isinstance(value, torch.dtype) and value is not torch.float64 for value in (*call.args, *call.kwargs.values()))
    for one, other, both in zip(of_x, of_y, of_both, strict=True):
        bound = 1e-5 if rounds or both.dtype == torch.float32 else 1e-11
        wanted = 2.5 * one - 0.75 * other
        finite = wanted.isfinite()  # divided by zero, what is scaled is infinite or no number in either order
        text = f"{call}, driven by tensor {choice}: not linear"
        torch.testing.assert_close(both[finite].to(wanted.dtype), wanted[finite], rtol=bound, atol=bound, msg=text)
    return True


def _names(call: Call, choice: tuple[int, ...]) -> set[str]:
    """The names of the arguments that hold the chosen tensors."""
    numbers, found = itertools.count(), set()
    named = {argument.name: value for argument, value in zip(call.target._schema.arguments, call.args, strict=False)}
    for name, value in {**named, **call.kwargs}.items():
        if any(isinstance(item, Tensor) and next(numbers) in choice for item in pytree.tree_leaves(value)):
            found.add(name)
    return found


@pytest.mark.parametrize("target", sorted(LINEAR, key=str), ids=str)
def test_linear(target: Any) -> None:
    """No argument, given in any way, makes a claim untrue; and each row of the table claims something."""
    held: set[str] = set()
    for sizes in SIZES:
        for call in (variant for base in base_calls(target, sizes) for variant in variants(base)):
            for choice in claims(call):
                if check(call, choice):
                    held.update(_names(call, choice))
    assert held.issuperset(name for row in LINEAR[target] for name in row.linear_arguments if name != "value"), held


def test_an_argument_that_no_row_names() -> None:
    """A row covers calls with the default value of such an argument."""
    row, graph = Linear(("self",)), fx.Graph()
    x = graph.placeholder("x")
    given: list[dict[str, Any]] = [{}, {"dtype": None}, {"dtype": torch.int64}]
    calls = [graph.call_function(aten.sum.default, (x,), keywords) for keywords in given]
    assert [row.holds(call, {x}) for call in calls] == [True, True, False]
    scaled = graph.call_function(aten.add.Tensor, (x, x), {"alpha": 2})
    assert not Linear(("self", "other")).holds(scaled, {x})


def test_types_that_carry() -> None:
    """By range and precision, not by name."""
    types = {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}

    def found(driver: torch.dtype, gradient: torch.dtype) -> set[torch.dtype]:
        return {dtype for dtype in types if preserves_scale(dtype, driver, gradient)}

    double, single, half = torch.float64, torch.float32, torch.bfloat16
    assert found(double, double) == {double}
    assert found(double, torch.int32) == found(torch.int32, double) == set()
    assert found(double, single) == found(single, double) == {double, single}
    assert found(single, single) == found(half, single) == {double, single, half}
    assert found(double, half) == found(single, half) == found(half, half) == {double, single, half}


# -- gradients of a loss that is scaled


def with_hook(hook: Callable[[Tensor], Tensor], x: Tensor, w: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    q = (x @ w)[:, None]
    logits = (x + F.scaled_dot_product_attention(q, q, x[:, None], is_causal=True)[:, 0] @ w) @ head
    logits.register_hook(hook)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


HOOKS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = named_cases("hooks", globals())


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_on_logits(name: str) -> None:
    hook, in_one_pass = HOOKS[name]
    draw = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=draw).double().requires_grad_() for shape in ((2, 6, 4), (4, 4), (4, 7))]
    tensors.append(torch.randint(0, 7, (2, 6), generator=draw))
    (5 * with_hook(hook, *tensors)).backward()
    wanted = take_gradients(tensors)
    recorded, _ = traced(functools.partial(with_hook, hook), tensors, scale=5.0, chunk_size=4, loss_chunk_size=3)
    assert bool(recorded.facts[-1].stages[-1].gradient_in_forward) is in_one_pass
    torch.testing.assert_close(take_gradients(tensors), wanted, rtol=1e-12, atol=1e-12)


# -- gradients that are homogeneous in a number per sequence are computed with the loss, all others in a second pass

WIDTH, VOCABULARY, LENGTH = 4, 7, 6
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)


LOSSES = read(Path(__file__).parent / "support" / "passes_of_losses.txt", 2)
ONE, TWO = dict(LOSSES["one"]), dict(LOSSES["two"])  # type: ignore[arg-type]


class Bent(torch.autograd.Function):
    """The identity, with a nonlinear gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.tanh(gradients[0])


def loss_of(made: str, x: Tensor, weight: Tensor, labels: Tensor, keep: Tensor) -> Tensor:
    """A loss of `passes_of_losses.txt`."""

    def logits() -> Tensor:
        return x @ weight

    def logps(of: Tensor | None = None) -> Tensor:
        return (logits() if of is None else of).log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)

    def sums() -> Tensor:
        return (logps() * keep).sum(1)

    def squares(rows: Tensor) -> Tensor:
        return rows.sum(1).square().mean()

    result: Tensor = eval(made, {**globals(), **locals(), "rows": torch.arange(len(labels))})
    return result


def after_attention(made: str) -> Callable[..., Tensor]:
    def function(x: Tensor, w: Tensor, *others: Tensor) -> Tensor:
        q = (x @ w)[:, None]
        x = x + F.scaled_dot_product_attention(q, q, x[:, None], is_causal=True)[:, 0] @ w
        return loss_of(made, x, *others)

    return function


def operands(batch: int, length: int, trained: bool) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = (batch, length, WIDTH), (WIDTH, WIDTH), (WIDTH, VOCABULARY)
    tensors = [torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in shapes]
    labels = torch.randint(0, VOCABULARY, (batch, length), generator=draw)
    keep = (torch.rand(batch, length, generator=draw) < 0.7).double()
    return [*(item.requires_grad_(i < 2 or trained) for i, item in enumerate(tensors)), labels, keep]


def is_one_pass(made: str, batch: int = 4, length: int = LENGTH, trained: bool = False) -> bool:
    """Whether the backward has no matmul with the vocabulary; the gradients are eager's."""
    return in_one_pass(compare_function(after_attention(made), operands(batch, length, trained), (3, 1, 4), streams=None))


def in_one_pass(facts: Facts) -> bool:
    last = facts.stages[-1]
    products = [node for node in facts.joint.nodes if node.target in PRODUCTS and VOCABULARY in _sizes(node)]
    own = {*last.forward, *last.backward}
    return bool(last.gradient_in_forward) and bool(products) and all(node in own for node in products)


def _sizes(node: Any) -> set[int]:
    return {size for item in (node, *node.all_input_nodes) for size in item.meta["val"].shape}


SOME = ("preferences", "selected", "filled if there is any", "some with zero gradients")


@pytest.mark.parametrize("name", only(SOME, ONE))
def test_one_pass(name: str) -> None:
    assert is_one_pass(ONE[name])


@pytest.mark.parametrize("name", only(["time first"], ["preferences", "time first"]))
@pytest.mark.parametrize("batch", [LENGTH, WIDTH, 2])
def test_batches_as_long_as_the_sequence(name: str, batch: int) -> None:
    assert is_one_pass(ONE[name], batch, length=batch)


def test_a_trained_head_runs_in_two_passes() -> None:
    assert not is_one_pass(ONE["preferences"], trained=True)


@pytest.mark.parametrize("trained", [False, True])
def test_one_number_scales_weights_as_well(trained: bool) -> None:
    assert is_one_pass("sums().sum().square()", trained=trained)
    assert is_one_pass("sums()[0].square()", batch=1, trained=trained)


@pytest.mark.parametrize("name", only(["normed over the batch", "rolled", "two terms", "selected twice"], TWO))
@pytest.mark.parametrize("batch", [4, pytest.param(LENGTH, marks=pytest.mark.long)])
def test_two_passes(name: str, batch: int) -> None:
    assert not is_one_pass(TWO[name], batch)


@pytest.mark.parametrize("batch", [4, LENGTH])
def test_sequences_that_are_mixed_before_the_head_are_exact(batch: int) -> None:
    is_one_pass("squares(logps((x + x.mean(0, keepdim=True)) @ weight))", batch)


def test_an_infinite_cotangent_scale() -> None:
    """Gradients that it reaches are NaN in eager and here; other sequences have finite ones."""
    infinite = "((rows == 0) * 1e4 * -(s := sums())).exp().sum() + s.square().sum()"
    tensors, function = operands(3, LENGTH, False), after_attention(infinite)
    tensors[-1].fill_(1)
    function(*tensors).backward()
    wanted = take_gradients(tensors)
    recorded, _ = traced(function, tensors, chunk_size=3, loss_chunk_size=2)
    found = take_gradients(tensors)
    assert in_one_pass(recorded.facts[-1]) and not wanted["0"].isfinite().all()  # type: ignore[union-attr]
    for name in wanted:
        assert torch.equal(found[name].isfinite(), wanted[name].isfinite())  # type: ignore[union-attr]
    torch.testing.assert_close(found["0"][1:], wanted["0"][1:], rtol=1e-12, atol=1e-12)  # type: ignore[index]
