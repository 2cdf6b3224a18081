"""Every range that the analysis of values claims, held against the numbers that operators and programs compute."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from streamfx.ir.ranges import Range, activation, assumed_growth, cast_range, constant, full_range, hull, is_exact_in
from streamfx.passes.ops.ranges import TRANSFERS, ValueRanges
from streamfx.passes.ops.ranges.arithmetic import plus, times
from tests.support.spread import only, spread
from tests.support.tables import named_cases, read
from tests.support.values import ASSUMED, HURTING, TYPES, Drawn, drawn, traced_values

aten = torch.ops.aten
INF = math.inf
EASY = settings(deadline=None, suppress_health_check=list(HealthCheck))


def holds(known: Range, found: Tensor) -> bool:
    """Whether all numbers of a tensor are in a range."""
    if found.dtype.is_complex or not found.numel():
        return True
    numbers = found.detach().flatten().tolist()
    return all(known.nan if x != x else known.low <= x <= known.high for x in numbers)


# -- ranges in types

numbers = st.one_of(st.integers(-300, 300), st.floats(-1e5, 1e5), st.sampled_from([0, -INF, INF, 1e39, -1e39, 2**31, -(2**63)]))


@settings(EASY, max_examples=300)
@given(st.sampled_from(TYPES), numbers, numbers, st.floats(0, 1))
def test_casts_of_a_range(dtype: torch.dtype, low: float, high: float, share: float) -> None:
    """Wrapped, rounded, infinite or true: a number of the range, cast, is in the range cast."""
    low, high = min(low, high), max(low, high)
    inside = low + share * (high - low) if math.isfinite(low) and math.isfinite(high) else low
    source = torch.int64 if isinstance(inside, int) else torch.float64
    if source == torch.int64 and not -(2**63) <= inside < 2**63:
        return
    cast = torch.tensor(min(max(inside, low), high), dtype=source).to(dtype)
    if dtype.is_floating_point or math.isfinite(inside):  # what becomes of infinity as an integer is not defined
        assert holds(cast_range(Range(low, high), dtype), cast)


@settings(EASY, max_examples=300)
@given(st.sampled_from(TYPES), st.integers(-(2**54), 2**54))
def test_whole_numbers_that_a_type_holds(dtype: torch.dtype, number: int) -> None:
    if is_exact_in(dtype, min(number, 0), max(number, 0)):
        assert int(torch.tensor(number, dtype=torch.int64).to(dtype).item()) == number


# -- one law for all transfer functions


@pytest.mark.compiled
@pytest.mark.parametrize("seeds", spread([range(8), range(8, 100), range(100, 200), range(200, 400)], 4), ids=str)
def test_transfer_functions_hold(seeds: range) -> None:
    """On difficult numbers, for every argument and type: results are in their ranges."""
    for operator, seed in itertools.product(TRANSFERS.keys() - ASSUMED, seeds):
        call = drawn(operator, seed)
        graph, values = call.traced()
        try:
            results = call.run()
        except (RuntimeError, NotImplementedError, IndexError):  # not for this type
            continue
        for position, result in enumerate(results):
            known = values(position)
            text = f"{operator} seed {seed} result {position}: {known} does not hold {result.flatten()[:8]}\n{graph}"
            assert holds(known, result), text


EDGES = [-1200.0, -746, -745.13, -745, -709.5, -705, -701, -104.5, -103, -88.5, -87, -17.5, -17, -10, -9, -1e-4, -1e-9, -1e-310]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_functions_hold_where_types_end(dtype: torch.dtype) -> None:
    """Very small numbers are not zero, and very large ones not infinite."""
    edges = [*EDGES, *(-edge for edge in EDGES), 709.8, 710.3]
    for operator, row in TRANSFERS.items():
        if not row.elementwise or row.is_exact or "self" not in row.names:
            continue
        for one, other in itertools.pairwise(sorted(edges)):
            call = Drawn(operator, (torch.tensor([one, other], dtype=dtype),), {}, True)
            try:
                results = call.run()
            except RuntimeError:  # it takes more than one operand
                break
            known = call.traced()[1](0)
            assert holds(known, results[0]), f"{operator} of {one} and {other}: {known} does not hold {results[0]}"


def test_a_call_with_an_argument_that_no_row_names_is_not_covered() -> None:
    """`sub` of two vectors with alpha, `sum` into another type, `div` that rounds: known; an argument from nowhere: not."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(aten.addmm.default, (x, x, x), {"beta": 0.5})
    with FakeTensorMode():
        x.meta["val"] = torch.zeros(3, 3)
        node.meta["val"] = torch.zeros(3, 3)
    row = TRANSFERS[aten.addmm.default]
    without = type(row)(row.function, row.names - {"beta"}, row.elementwise)
    with mock.patch.dict(TRANSFERS, {aten.addmm.default: without}):
        assert ValueRanges([x]).of(node) == full_range(torch.float32)


# -- whole programs

PARTS = {name: [part for (part,) in rows] for name, rows in read(Path(__file__).parent / "support" / "programs.txt", 1).items()}


@st.composite
def programs(draw: st.DrawFn, depth: int = 3) -> str:
    if not depth or draw(st.integers(0, 4)) == 0:
        return draw(st.sampled_from(PARTS["leaves"]))
    if draw(st.booleans()):
        return "(" + draw(st.sampled_from(PARTS["of one"])).format(draw(programs(depth - 1))) + ")"
    one, other = draw(programs(depth - 1)), draw(programs(depth - 1))
    return "(" + draw(st.sampled_from(PARTS["of two"])).format(one, other) + ")"


def _inputs(seed: int) -> list[Tensor]:
    """Numbers, a mask, a gate, and a table."""
    generator = torch.Generator().manual_seed(seed)

    def chosen(numbers: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(numbers)[torch.randint(len(numbers), (7,), generator=generator)].to(dtype)

    drawn = [chosen([0, 1, 2, 3], torch.int64), chosen([0, 1, 1, 2, -3], torch.int64), chosen(HURTING, torch.float32)]
    return [*drawn, chosen([-INF, 0, 1, -1e30, 3], torch.float32)[:4]]


@pytest.mark.parametrize("dtype", only([torch.int8], [torch.int64, torch.int32, torch.uint8, torch.int8, torch.bfloat16]))
@settings(EASY, max_examples=40)
@given(program=programs(), seed=st.integers(0, 9))
def test_programs_stay_within_their_ranges(dtype: torch.dtype, program: str, seed: int) -> None:
    """Index arithmetic, data masks, gates, tables, fills and casts: every value of the traced graph is in its range."""

    def function(*inputs: Tensor) -> Tensor:
        names = dict(zip(("ids", "mask", "gate", "table"), inputs, strict=True))
        result: Tensor = eval(program, {**names, "i": torch.arange(7).to(dtype), "torch": torch})
        return result

    _check(function, _inputs(seed), program)


def _check(function: Callable[..., Tensor], inputs: list[Tensor], program: str) -> None:
    try:
        function(*inputs)
    except (RuntimeError, TypeError, NotImplementedError):  # no program: an operator has no such type
        return
    for node, known, found in traced_values(function, inputs):
        assert holds(known, found), f"{program}: {node.format_node()} is claimed to be {known}, and is {found.flatten()[:8]}"


def test_ranges_join_and_a_zero_has_either_sign() -> None:
    """A quotient by zero may have either sign: `1 / (x * 0)` does not prove that keys are hidden."""
    assert hull(constant(1), constant(3)) == Range(1, 3)
    assert hull(Range(0, 1, True), constant(3)) == Range(0, 3, True)
    assert constant(math.nan) == Range(-INF, INF, True)
    *_, (_, claimed, _) = traced_values(lambda x: (x * 0).reciprocal(), [torch.tensor([-1.0, 1.0])])
    assert claimed == Range(-INF, INF, True)


FOUND: dict[str, Callable[[Tensor], Tensor]] = named_cases("earlier faults", globals(), "x")


@pytest.mark.parametrize("name", FOUND)
def test_earlier_faults_stay_within_their_ranges(name: str) -> None:
    numbers = torch.linspace(-40, 40, 8, dtype=torch.float64)
    _check(FOUND[name], [numbers], name)


def test_assumptions_about_products_add_up() -> None:
    """Repeated products with a known number leave the assumed range; sums and products with weights do not."""
    known = activation(torch.float64)
    for count in range(1, 4):
        made = times(known, constant(1e5))
        known = replace(made, assumed=assumed_growth([known, constant(1e5)], made))
        assert bool(known.assumed) == known.is_ordinary == (count < 3)
    ordinary = activation(torch.float64)
    for made in (plus(ordinary, ordinary), times(ordinary, ordinary)):
        assert assumed_growth([ordinary, ordinary], made) == pytest.approx(1)
