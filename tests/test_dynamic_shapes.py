"""Gradients equal eager's if batch and length change between calls, and few graphs are compiled, with plans up to a length."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamfx.cost.memory import cost_of
from streamfx.dialect.attention import ATTENTION, ATTENTION_BACKWARD
from streamfx.dialect.products import GROUPED_OUTER
from streamfx.dialect.rel_shift import RELATIVE_SHIFT, RELATIVE_SHIFT_BACKWARD
from streamfx.errors import OverBudgetError
from streamfx.ir.dynamic_lengths import Lengths
from streamfx.ir.facts import Facts, known
from streamfx.ir.joint import is_size
from streamfx.passes.lowering.accumulating_lowerings import ACCUMULATING_LOWERINGS
from streamfx.passes.lowering.lowering_table import LOWERINGS
from streamfx.passes.partition.plan_simulator import held_bytes
from tests.support import decoders
from tests.support.exactness import check_streamed, recorder
from tests.support.small import Causal, tokens
from tests.support.spread import only, spread
from tests.support.tables import named_cases
from tests.support.twins import batch, compiled, same_step, twins

pytestmark = pytest.mark.compiled


def test_a_step_that_fits_is_compiled_after_inductor_asks_for_another_trace() -> None:
    """The mean over a number of labels that Dynamo passes as a tensor: Inductor asks for it as a constant."""
    own, eager = twins(decoders.Plain)
    call = torch.compile(own, backend="streambp", dynamic=True, options={"memory_budget": "1GiB", "strict": True})
    for length in (13, 17):
        same_step(call, own, eager, batch(length=length))


# models, lengths, whether these are marked as dynamic: if so, the first length has no graph that others do not share
LENGTHS: list[tuple[Callable[[], nn.Module], tuple[int, ...], bool]] = [
    (decoders.Plain, (13, 9, 21, 6, 30, 5), False),
    *((make, (13, 9, 21), True) for make in (decoders.Window, decoders.Triangle, decoders.HalfRope)),
]


@pytest.mark.parametrize(("make", "lengths", "marked"), only(LENGTHS[:1], LENGTHS))
def test_all_later_lengths_share_one_graph(make: Callable[[], nn.Module], lengths: tuple[int, ...], marked: bool) -> None:
    """Steps with other lengths have eager's gradients."""
    own, eager = twins(make)
    function, backend = compiled(own)
    for length in lengths:
        inputs = batch(2, length)
        for tensor in inputs.values() if marked else ():
            torch._dynamo.mark_dynamic(tensor, 1)
        same_step(function, own, eager, inputs)
    assert len(backend.compilations) == (1 if marked else 2)
    check_streamed(backend.facts, True, None if marked else {"causal"})


class Fixed(Causal):
    """What the model does with ids of one length alone fixes that length of the ids, and nothing of the labels."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return super().forward(ids * 1 if ids.shape[1] == 9 else ids, labels)


@pytest.mark.parametrize("make", [Causal, Fixed])
def test_batch_and_length_may_change_together(make: Callable[[], nn.Module]) -> None:
    """Torch knows of two tensors only that they have as many elements: which rows belong together follows from their sizes."""
    model = make().double()
    eager, (function, backend) = copy.deepcopy(model), compiled(model)
    for rows, length in ((2, 13), (3, 9), (5, 9 if make is Fixed else 21)):
        same_step(function, model, eager, {"ids": tokens(rows, length), "labels": tokens(rows, length)})
    check_streamed(backend.facts, True, {"causal"})


aten = torch.ops.aten
Program = Callable[["GivenNumber", Tensor, int], Tensor]


class GivenNumber(nn.Module):
    """A few operators on a number that comes with the input, between two linear layers, and attention."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program, self.up, self.down = program, nn.Linear(8, 8), nn.Linear(8, 8)
        self.table, self.mask = nn.Parameter(torch.randn(11, 8)), nn.Buffer(torch.ones(40, 40).tril())

    def forward(self, x: Tensor, number: int) -> Tensor:
        return self.down(attended(self.program(self, self.up(x), number))).sin().square().mean()


def attended(x: Tensor, mask: Tensor | None = None, **more: Any) -> Tensor:
    q = x[:, None]
    return F.scaled_dot_product_attention(q, q, q, mask, is_causal=mask is None, **more)[:, 0]


def between_triangles(m: GivenNumber, x: Tensor, n: int) -> Tensor:
    ones = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
    return attended(x, ones.tril() & ones.triu(-n)) + attended(x, ones.tril(n) & ones.triu(-(x.shape[1] // 2)))


def joined(x: Tensor, positions: Callable[[Tensor], Tensor]) -> Tensor:
    """Attention over two documents, each with positions of its own."""
    position = positions(torch.arange(x.shape[1] // 2 + 1))[: x.shape[1]]
    return attended(x, position <= position[:, None])


# operators that are written for a chunk, or added up, by more than a copy, on a number that follows from sizes or was given
GIVEN: dict[str, tuple[Program, tuple[Any, ...]]] = named_cases("numbers that are given", globals())

OTHERS = {
    *(RELATIVE_SHIFT, RELATIVE_SHIFT_BACKWARD, GROUPED_OUTER),  # whose numbers are sizes: other tests make them dynamic
    *(aten.convolution.default, aten.convolution_backward.default),  # refused by their rule
    *(ATTENTION, ATTENTION_BACKWARD, aten.select.int, aten.select_backward.default),  # of which Dynamo makes constants
}


@pytest.mark.parametrize("name", spread(GIVEN, 5))
def test_operators_accept_symbolic_numbers(name: str) -> None:
    """A chunk's operator takes them as the body has them: nodes of the joint graph are none of the body."""
    program, operators = GIVEN[name]
    model, backend = GivenNumber(program).double(), recorder(bodies="eager", chunk_size=5)
    call = torch.compile(model, backend=backend, dynamic=True)
    for length, number in ((13, 5), (21, 7), (14, 7))[: 3 if name == "a mask that changes" else 2]:
        x, how = torch.randn(2, length, 8, dtype=torch.float64), dict[str, Any](allow_unused=True, materialize_grads=True)
        found, truth = (torch.autograd.grad(run(x, number), [*model.parameters()], **how) for run in (call, model))
        torch.testing.assert_close(found, truth, rtol=1e-10, atol=1e-12)
        model.mask[3, 7] = 1
    check_streamed(backend.facts, None, None)
    facts = backend.facts[-1]
    assert facts.program is not None
    for target in operators:
        calls = facts.joint.graph.find_nodes(op="call_function", target=target)
        assert any(is_size(argument) for node in calls for argument in node.all_input_nodes), target


def test_each_operator_with_numbers_is_tested_with_symbols() -> None:
    """Those that have a rule of their own for chunks, or for sums over chunks."""
    schemas = {
        target: str(target._schema)
        for target in (*LOWERINGS, *ACCUMULATING_LOWERINGS)
        if isinstance(target, torch._ops.OpOverload)
    }
    taking = {target for target, schema in schemas.items() if re.search(r"SymInt|Scalar |float\?", schema)}
    assert taking - OTHERS == {target for _, operators in GIVEN.values() for target in operators}


# -- a plan holds up to a proven length; a longer call is planned like a first one

CHEAP = {"keep_every": 1, "save": "inputs", "bodies": "eager"}  # one candidate


class Calls:
    """Training steps of one compiled model, with lengths that change."""

    def __init__(self, **options: Any) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.model, self.backend = Causal().double(), recorder(**options)
        self.compiled = torch.compile(self.model, backend=self.backend)

    def step(self, length: int) -> Facts | None:
        """What was found in the graph that this call was compiled to; None where it runs one that was there."""
        known, ids = len(self.backend.compilations), tokens(2, length)
        torch._dynamo.maybe_mark_dynamic(ids, 1)
        found, truth = (torch.autograd.grad(call(ids, ids), [*self.model.parameters()]) for call in (self.compiled, self.model))
        torch.testing.assert_close(found, truth, rtol=1e-10, atol=1e-12)
        compilations = self.backend.compilations[known:]
        return compilations[0].facts[-1] if compilations else None


def peak(facts: Facts | None) -> int:
    """Predicted bytes of a step, for the lengths of the call that it was compiled for."""
    assert facts is not None and facts.program is not None
    return cost_of(facts.program.forward, facts.program.backward, 1).peak + held_bytes(facts.program.forward.graph)


def most(facts: Facts | None) -> int:
    """The longest sequence that a plan holds for."""
    assert facts is not None
    (length,) = known(facts.lengths).numbers.values()
    return int(length)


@pytest.fixture
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of few rows, as those of long sequences are, and few simulations."""
    monkeypatch.setattr("streamfx.passes.partition.budget_search.MIN_ROWS", 16)
    monkeypatch.setattr("streamfx.ir.dynamic_lengths.MAX_DOUBLINGS", 2)


@pytest.mark.usefixtures("small_sizes")
def test_an_unchunked_plan_holds_up_to_a_length() -> None:
    """A short call first: the long one stays within the budget."""
    budget = 800 << 10
    calls = Calls(memory_budget=budget, **CHEAP)
    short = calls.step(32)
    assert short is not None and short.program is None
    assert 32 < most(short) < 1000
    assert calls.step(most(short)) is None
    again = calls.step(1000)
    assert peak(again) <= budget
    assert most(again) >= 1000
    assert calls.step(700) is None  # by the plan for longer ones


@pytest.mark.usefixtures("small_sizes")
def test_a_length_that_fits_no_plan_is_refused_on_its_call() -> None:
    calls = Calls(memory_budget=100 << 10, chunk_size=8, loss_chunk_size=8, **CHEAP)
    calls.step(16)
    with pytest.raises(OverBudgetError, match="smallest possible peak is"):
        calls.step(4000)
    assert calls.step(20) is None


@pytest.mark.usefixtures("small_sizes")
def test_values_saved_because_they_are_small_are_saved_up_to_a_length() -> None:
    """Results of attention are saved if they are small compared to the model, up to a length."""
    calls = Calls(chunk_size=8, loss_chunk_size=8)
    short = calls.step(9)
    assert short is not None and any(short.plan.kept)
    assert 9 < most(short) < 64
    assert calls.step(most(short)) is None
    beyond = calls.step(most(short) + 1)
    assert beyond is not None and not any(beyond.plan.kept)
    assert calls.step(64) is calls.step(8) is None


def test_joined_plans_hold_for_the_lengths_of_both() -> None:
    s, t = sympy.symbols("s t")
    assert Lengths({s: 5, t: 6}).intersection(Lengths({s: 7, t: 3})) == Lengths({s: 5, t: 3})
    assert Lengths({s: 5}).intersection(None) == Lengths({s: 5})
