"""Every rule is held to its law: the operator on a chunk, with the operands it demands, is the chunk of the operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from streamfx.passes.ops.rules import RULES, rule_for
from streamfx.runtime.associative import AssociativeBackward
from streamfx.runtime.custom_scan import Backward
from tests.support.laws import Call, check, traced
from tests.support.samples import SAMPLES, Sizes, calls

aten = torch.ops.aten
small = st.integers(1, 5)
sizes = st.builds(Sizes, b=small, t=small, d=small, k=small, v=small, seed=st.integers(0, 9))
DISTINCT, EQUAL = Sizes(b=2, t=5, d=3, k=4, v=7), Sizes(b=3, t=3, d=3, k=3, v=3)
POSITIONS = {aten.arange.default, aten.arange.start, aten.arange.start_step, aten.linspace.default, aten.eye.default}
MIX_ALL = {aten.max.default, aten.min.default, aten.prod.default, aten.any.default, aten.all.default}
FROM_THE_LAST_ROW = {Backward, AssociativeBackward}  # in loops of a backward half alone: test_stateful, test_associative_scans
NEVER_STREAM = {aten.scalar_tensor.default}  # no axis at all


def test_every_rule_has_a_sample() -> None:
    assert not sorted(map(str, RULES.keys() - SAMPLES.keys())), "add sample calls to tests/support/samples"
    assert not sorted(map(str, SAMPLES.keys() - RULES.keys())), "samples of operators without a rule"


@pytest.mark.parametrize("target", sorted(SAMPLES, key=str), ids=str)
@settings(max_examples=6, deadline=None, database=None, derandomize=True)
@example(DISTINCT, 2)
@example(EQUAL, 2)
@given(sizes, st.integers(1, 6))
def test_law(target: Any, sizes: Sizes, chunk_size: int) -> None:
    for call in calls(target, sizes):
        for _ in check(call, chunk_size):
            pass


@pytest.mark.parametrize("target", sorted(SAMPLES.keys() - NEVER_STREAM, key=str), ids=str)
def test_something_streams(target: Any) -> None:
    """A rule that asks for everything whole would hold the law, and be of no use."""
    streams = [where for call in calls(target, DISTINCT) for where in check(call, 2)]
    assert streams or target in POSITIONS | MIX_ALL | FROM_THE_LAST_ROW


# -- operators that need no entry, because torch tags them as pointwise


def tagged_pointwise() -> list[Any]:
    found = []
    for name in dir(aten):
        packet = getattr(aten, name)
        for overload in getattr(packet, "overloads", list)():
            target = getattr(packet, overload)
            schema = target._schema
            is_plain = not schema.is_mutable and not any(a.is_out for a in schema.arguments)
            if torch.Tag.pointwise in target.tags and is_plain and target not in RULES:
                found.append(target)
    return found


def pointwise_call(target: Any, s: Sizes, shapes: list[tuple[int, ...]], integral: bool) -> Call:
    """A call made up from the schema: tensors of the given shapes in turn, small numbers for scalars."""
    remaining = iter(shapes)
    args: list[Any] = []
    for argument in target._schema.arguments:
        if argument.kwarg_only:
            break
        kind = str(argument.type)
        if kind in ("Tensor", "Optional[Tensor]"):
            shape = next(remaining, shapes[0])
            args.append(s.integers(4, *shape) + 1 if integral else s.positive(*shape))
        elif kind in ("number", "Optional[number]"):
            args.append(2)
        elif argument.has_default_value() and kind not in ("Optional[number]", "Optional[Tensor]"):
            break
        else:
            args.append({"int": 1, "float": 0.5, "bool": False}[kind])
    if target is aten.where.self:
        args[0] = args[0] > args[0].mean() if not integral else args[0] > 2
    if target is aten.masked_fill.Scalar:
        args[1] = s.booleans(*args[1].shape)
    if target is aten.native_dropout_backward.default:
        args[1] = s.booleans(*args[1].shape)
    if target is aten.polygamma.default:
        args[0], args[1] = 1, args[1]
    mode = {"rounding_mode": "floor"} if target._overloadname.endswith("_mode") else {}
    return Call(target, tuple(args), {"decimals": 1} if target is aten.round.decimals else mode)


def runnable(target: Any, s: Sizes, shapes: list[tuple[int, ...]]) -> Call:
    for integral in (False, True):
        call = pointwise_call(target, s, shapes, integral)
        try:
            call.results()
        except (RuntimeError, NotImplementedError):
            continue
        return call
    raise AssertionError(f"no sample call of {target} runs: add one to tests/support/samples")


NOT_TENSORS = {"aten.equal.default"}
RANDOM = {"aten.rrelu.default"}


@pytest.mark.parametrize("target", [t for t in tagged_pointwise() if str(t) not in NOT_TENSORS | RANDOM], ids=str)
def test_law_of_pointwise_operators(target: Any) -> None:
    torch.manual_seed(0)
    broadcasts: list[list[tuple[int, ...]]] = [[(2, 5, 3)] * 3, [(2, 5, 3), (5, 1), (3,)], [(3, 3), (3, 1), (1, 3)]]
    for shapes in broadcasts:
        backward = str(target).endswith("_backward.default")
        for where in check(runnable(target, DISTINCT, shapes[:1] * 3 if backward else shapes), 2):
            assert where


def test_pointwise_without_a_tensor_result_has_no_rule() -> None:
    """`equal` is tagged as pointwise and compares whole tensors."""
    graph = torch.fx.Graph()
    node = graph.call_function(aten.equal.default, (graph.placeholder("a"), graph.placeholder("b")))
    assert rule_for(node) is None


# -- what a rule has to decline, because its parts do not add up


def declined(target: Any, *args: Any, **kwargs: Any) -> bool:
    one = traced(Call(target, args, kwargs))
    return one.node not in one.axes.signatures


def test_rules_decline_what_they_do_not_cover() -> None:
    x = torch.randn(4, 3, dtype=torch.float64)
    index = torch.zeros(4, dtype=torch.long)
    assert declined(aten.embedding_dense_backward.default, x, index, 5, -1, True)  # divides by counts over all rows
    assert declined(aten.index.Tensor, x, [x[:, 0] > 0])  # as many rows as there are true
    assert declined(aten.nonzero.default, x)


def is_exact_in_chunks(target: Any, *args: Any, **kwargs: Any) -> bool:
    call = Call(target, args, kwargs)
    if traced(call).node not in traced(call).axes.signatures:
        return True  # it runs whole
    try:
        list(check(call, 2))
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_losses_with_a_reduction(reduction: int) -> None:
    """Tagged or listed as pointwise, but divided by the number of all elements where the reduction is a mean."""
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.rand(5, 3, dtype=torch.float64)
    gradient: Tensor = x * 2 if reduction == 0 else torch.tensor(1.5, dtype=torch.float64)
    backwards = (aten.mse_loss_backward, aten.smooth_l1_loss_backward, aten.huber_loss_backward)
    assert is_exact_in_chunks(aten.mse_loss.default, x, y, reduction)
    for packet in backwards:
        more = () if packet is aten.mse_loss_backward else (1.0,)
        assert is_exact_in_chunks(packet.default, gradient, x, y, reduction, *more), packet
