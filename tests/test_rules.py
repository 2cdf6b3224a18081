"""Every rule is held to its law: the operator on a chunk, with the operands it demands, is the chunk of the operator."""

import re
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import streamfx
from streamfx.ir.signature import Signature
from streamfx.passes.ops.rules import RULES, rule_for
from streamfx.passes.ops.rules.registry import notation_rule
from tests.support.laws import Call, check, traced
from tests.support.samples import SAMPLES, Sizes, calls
from tests.support.spread import spread
from tests.support.tables import listed_cases, named_cases

aten = torch.ops.aten
small = st.integers(1, 5)
sizes = st.builds(Sizes, b=small, t=small, d=small, k=small, v=small, seed=st.integers(0, 9))
DISTINCT, EQUAL = Sizes(b=2, t=5, d=3, k=4, v=7), Sizes(b=3, t=3, d=3, k=3, v=3)
POSITIONS = {aten.arange.default, aten.arange.start, aten.arange.start_step, aten.linspace.default, aten.eye.default}
MIX_ALL = {aten.max.default, aten.min.default, aten.prod.default, aten.any.default, aten.all.default}
NEVER_STREAM = POSITIONS | MIX_ALL | {aten.scalar_tensor.default}
EACH = pytest.mark.parametrize("target", sorted(SAMPLES, key=str), ids=str)


def test_every_rule_has_a_sample() -> None:
    """A rule for all operators of a type, which have states, is held to eager by the tests of recurrences."""
    missing = {target for target in RULES.keys() - SAMPLES.keys() if not isinstance(target, type)}
    assert not sorted(map(str, missing)), "add sample calls to tests/support/samples.txt"
    assert not sorted(map(str, SAMPLES.keys() - RULES.keys())), "samples of operators without a rule"


@EACH
def test_law(target: Any) -> None:
    """And something streams: a rule that asks for everything whole would hold the law, and be of no use."""
    assert [where for call in calls(target, DISTINCT) for where in check(call, 2)] or target in NEVER_STREAM
    for call in calls(target, EQUAL):
        list(check(call, 2))


@pytest.mark.long
@EACH
@settings(max_examples=6, deadline=None, database=None, derandomize=True)
@given(sizes=sizes, chunk_size=st.integers(1, 6))
def test_law_for_any_sizes(target: Any, sizes: Sizes, chunk_size: int) -> None:
    for call in calls(target, sizes):
        list(check(call, chunk_size))


# -- operators that need no entry, because torch tags them as pointwise


def tagged_pointwise() -> list[Any]:
    packets = [getattr(aten, name) for name in dir(aten)]
    operators = [getattr(packet, name) for packet in packets for name in getattr(packet, "overloads", list)()]
    tagged = [target for target in operators if torch.Tag.pointwise in target.tags and target not in RULES]
    plain = [each for each in tagged if not each._schema.is_mutable and not any(a.is_out for a in each._schema.arguments)]
    return [target for target in plain if str(target) not in ("aten.equal.default", "aten.rrelu.default")]


def pointwise_call(target: Any, shapes: list[tuple[int, ...]], integral: bool) -> Call:
    """A call that fits the schema: tensors of the given shapes in turn, small numbers for scalars."""
    remaining = iter(shapes)
    args: list[Any] = []
    for argument in target._schema.arguments:
        kind = str(argument.type)
        if argument.kwarg_only or (argument.has_default_value() and kind not in ("number", *OPTIONAL)):
            break
        if kind in ("Tensor", "Optional[Tensor]"):
            shape = next(remaining, shapes[0])
            is_mask = argument.name in ("condition", "mask")
            numbers = DISTINCT.integers(4, *shape) + 1 if integral else DISTINCT.positive(*shape)
            args.append(DISTINCT.booleans(*shape) if is_mask else numbers)
        else:
            args.append({"int": 1, "float": 0.5, "bool": False}.get(kind, 2))
    mode = {"rounding_mode": "floor"} if target._overloadname.endswith("_mode") else {}
    return Call(target, tuple(args), {"decimals": 1} if target is aten.round.decimals else mode)


OPTIONAL = ("Optional[number]", "Optional[Tensor]")


def runnable(target: Any, shapes: list[tuple[int, ...]]) -> Call:
    for integral in (False, True):
        call = pointwise_call(target, shapes, integral)
        try:
            call.results()
        except (RuntimeError, NotImplementedError):
            continue
        return call
    raise AssertionError(f"no sample call of {target} runs: add one to tests/support/samples.txt")


@pytest.mark.parametrize("target", tagged_pointwise(), ids=str)
def test_law_of_pointwise_operators(target: Any) -> None:
    torch.manual_seed(0)
    backward = str(target).endswith("_backward.default")
    broadcasts: list[list[tuple[int, ...]]] = [[(2, 5, 3)] * 3, [(2, 5, 3), (5, 1), (3,)], [(3, 3), (3, 1), (1, 3)]]
    for shapes in broadcasts:
        list(check(runnable(target, shapes[:1] * 3 if backward else shapes), 2))


def test_pointwise_without_a_tensor_result_has_no_rule() -> None:
    """`equal` is tagged as pointwise and compares whole tensors."""
    graph = torch.fx.Graph()
    assert rule_for(graph.call_function(aten.equal.default, (graph.placeholder("a"), graph.placeholder("b")))) is None


# -- calls that rules decline, because their parts do not add up


def is_declined(target: Any, *args: Any) -> bool:
    one = traced(Call(target, args, {}))
    return one.node not in one.axes.signatures


def test_rules_decline_other_calls() -> None:
    x = torch.randn(4, 3, dtype=torch.float64)
    index = torch.zeros(4, dtype=torch.long)
    assert is_declined(aten.embedding_dense_backward.default, x, index, 5, -1, True)  # divides by counts over all rows
    assert is_declined(aten.index.Tensor, x, [x[:, 0] > 0])  # as many rows as there are true
    assert is_declined(aten.nonzero.default, x)


LOSSES = (aten.mse_loss_backward.default, aten.smooth_l1_loss_backward.default, aten.huber_loss_backward.default)


@pytest.mark.parametrize(("loss", "reduction"), product((aten.mse_loss.default, *LOSSES), (0, 1, 2)), ids=str)
def test_losses_with_a_reduction(loss: Any, reduction: int) -> None:
    """Tagged or listed as pointwise, but divided by the number of all elements where the reduction is a mean."""
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.rand(5, 3, dtype=torch.float64)
    gradient: Tensor = x * 2 if reduction == 0 else torch.tensor(1.5, dtype=torch.float64)
    args = [x, y, reduction] if loss not in LOSSES else [gradient, x, y, reduction, *(1.0,) * (loss is not LOSSES[0])]
    if not is_declined(loss, *args):
        list(check(Call(loss, tuple(args), {}), 2))


# -- rules that users register for their own operators

WIDTH = 8


@torch.library.custom_op("streamfx_tests::gate", mutates_args=())
def gate(x: Tensor) -> Tensor:
    """The first half, scaled by the second: [..., 2 d] to [..., d]."""
    left, right = x.chunk(2, -1)
    return left * right.sigmoid()


def gate_backward(ctx: Any, gradient: Tensor) -> Tensor:
    left, right = ctx.saved_tensors[0].chunk(2, -1)
    share = right.sigmoid()
    return torch.cat((gradient * share, gradient * left * share * (1 - share)), -1)


gate.register_fake(lambda x: x.new_empty(*x.shape[:-1], x.shape[-1] // 2))
gate.register_autograd(gate_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q = x[:, None]
        x = x + nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)[:, 0]
        y: Tensor = self.down(gate(self.up(x)))
        return y.square().mean()


X = (2, 11, WIDTH)
OTHERS = "has other tensors, or other dimensions, than the call"


RULES_THAT_DO_NOT_APPLY: list[tuple[Any, str]] = [
    (lambda call: vars(call)["rows"], "the rule for streamfx_tests.gate.default raises KeyError: 'rows'"),
    (lambda call: "... e! -> ... d", "must return a Signature or None, and returns '... e! -> ... d' (str)"),
    (lambda call: Signature((((0,),),), (((0,),),)), OTHERS),
    (None, "no rule for streamfx_tests.gate"),
    (lambda call: Signature((), ()), OTHERS),
    (lambda call: None, "the rule for streamfx_tests.gate.default does not cover these arguments"),
]


@pytest.mark.compiled
@pytest.mark.parametrize(("rule", "says"), spread(RULES_THAT_DO_NOT_APPLY, 3))
def test_a_rule_that_does_not_apply_is_reported(rule: Any, says: str) -> None:
    """The operator falls back, and is exact."""
    if rule is not None:
        streamfx.register_rule(gate, rule)
    model, x = Gated(), torch.randn(X)
    reasons = [stage["reason"] or "" for stage in streamfx.explain(model, x).summary()["stages"]]
    assert any(says in reason and "test_rules.py" in reason for reason in reasons), reasons
    assert rule is not None or {"streamfx.register_rule", "streamfx.register_recurrence"} <= set(
        re.findall(r"[\w.]+", str(reasons))
    )
    assert streamfx.verify(model, x, chunk_size=4).ok


@pytest.mark.compiled
def test_with_rules_it_streams() -> None:
    streamfx.register_rule(gate, "... e! -> ... d")
    model, x = Gated().double(), torch.randn(X, dtype=torch.float64, requires_grad=True)
    assert {stage["kind"] for stage in streamfx.explain(model, x).summary()["stages"]} == {"streamed"}
    assert streamfx.verify(model, x, chunk_size=4).max_error < 1e-12


REFUSED: list[tuple[Any, Any, str]] = listed_cases("refusals", globals())


def test_wrong_rules_are_refused() -> None:
    before = dict(RULES)
    for operator, rule, says in REFUSED:
        with pytest.raises(streamfx.RuleError, match=says):
            streamfx.register_rule(operator, rule)
    assert before == RULES


@torch.library.custom_op("streamfx_tests::add_to", mutates_args=())
def add_to(x: Tensor, y: Tensor) -> Tensor:
    """x + y, of any shapes that can be added."""
    return x + y


@torch.library.custom_op("streamfx_tests::spread_out", mutates_args=())
def spread_out(x: Tensor) -> Tensor:
    """[b d] to [b t], a dimension that the operand does not have."""
    return torch.linspace(0.0, 1.0, 11, dtype=x.dtype) * x.sum(1, keepdim=True)


add_to.register_fake(lambda x, y: x.new_empty(torch.broadcast_shapes(x.shape, y.shape)))
spread_out.register_fake(lambda x: x.new_empty(x.shape[0], 11))


FITTING: dict[str, Callable[[Tensor], Tensor]] = named_cases("fitting", globals(), "x")


@pytest.mark.compiled
@pytest.mark.parametrize("made", spread(FITTING.values(), 3), ids=FITTING)
def test_notation_holds_for_the_calls_it_fits(made: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    for operator, notation in ((add_to, "... d, ... d -> ... d"), (spread_out, "b d -> b t")):
        monkeypatch.setitem(RULES, operator._opoverload, notation_rule(notation))
    x = torch.randn(11, 11, WIDTH, dtype=torch.float64, requires_grad=True)

    def beside(x: Tensor) -> Tensor:
        """Scale rows by the result of an operator without gradients."""
        q = x.sin()[:, None]
        y = nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)[:, 0]
        return (y * made(y.detach())).square().mean()

    assert streamfx.verify(beside, x, chunk_size=4).max_error < 1e-12
