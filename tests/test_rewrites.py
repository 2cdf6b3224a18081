"""Each rewrite rule is exact, and a golden file shows it on a graph that it rewrites and on one that only looks similar."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from streamfx.dialect.associative_scan import SCAN_BACKWARD, TREE_SCAN, register_combine_graph
from streamfx.dialect.attention import ATTENTION_BACKWARD
from streamfx.ir.joint import is_tensor, outputs_of
from streamfx.ir.writer import GraphWriter
from streamfx.passes.rewrite.canonicalize import LATE_RULES, RULES
from streamfx.passes.rewrite.driver import simplify
from streamfx.passes.rewrite.pattern import RewriteRule, match_uses, op, rewrite_rule
from streamfx.passes.rewrite.views.column_strips import ColumnLine, clamp, fit_line
from streamfx.passes.rewrite.views.constant_writes import constant_writes_to_where
from streamfx.tools.report.listing import call_text, dtype_text, shape_text
from streamfx.torch_private.vmapped import traced_on_rows
from tests import test_attention, test_bags
from tests.support.canonical import Case, check, graphs, plain, same
from tests.support.flash_package import IS_STAND_IN, flash_attn_func, flash_attn_varlen_func
from tests.support.rewrites import CASES, EXAMPLES
from tests.support.stateful.blocks import blocks
from tests.support.stateful.selective import selective, selective_backward

aten = torch.ops.aten
all_reduce, wait_tensor = torch.ops._c10d_functional.all_reduce, torch.ops._c10d_functional.wait_tensor
BY_NAME = {rule.name: rule for rule in (*RULES, *LATE_RULES)}


@pytest.mark.parametrize("name", CASES)
def test_a_rewrite_is_exact(name: str) -> None:
    """Also for signed zeros, infinities, rows that see no key, empty dimensions and unusual operands."""
    check(CASES[name])


def test_gathered_rows_are_not_counted_from_the_end() -> None:
    _, after = graphs(CASES["gathered rows"])
    x, numbers = CASES["gathered rows"].inputs
    with pytest.raises(RuntimeError, match="out of bounds"):
        after(x, numbers - len(x))


GROUPS = {"groups": True, "groups, squeezed": True, **dict.fromkeys(("other groups", "one group", "two sums of groups"), False)}


@pytest.mark.parametrize("name", [*GROUPS, "groups in another type"])
def test_heads_stay_repeated_unless_their_gradients_are_summed(name: str) -> None:
    _, after = graphs(CASES[name])
    assert any(node.target is aten.expand.default for node in after.graph.nodes) is not GROUPS.get(name, False)


@pytest.mark.parametrize("line", [ColumnLine(f, o, b, s) for f in (-2, 1, 3) for b in (1, 3) for s in range(b) for o in (2, 9)])
def test_a_line_is_found_from_some_of_its_columns(line: ColumnLine) -> None:
    """Rows before the first one have other columns, and both edges of the buffer cut the line."""
    for end in (13, 7 if line.block == 1 else 9 + line.block):
        points = [(row, line.at(row)) for row in range(5, end)]
        found = fit_line(points, 24)
        assert found is not None and type(found.factor) is int
        assert [clamp(found.at(row), 24) for row, _ in points] == [clamp(column, 24) for _, column in points]


def test_a_replacement_does_not_read_the_size_of_its_node() -> None:
    """The graph would have a cycle."""

    def function(x: Tensor) -> list[Tensor]:
        padded = torch.nn.functional.pad(x, (0, 0, 3, 0)).sin()
        return [aten.slice_scatter(padded, torch.full((1, 1), 0.5, dtype=x.dtype).expand(padded.shape[0] - 1, 2), 0, 1)]

    x = plain(5, 2)
    before = make_fx(function, tracing_mode="symbolic")(x)
    graph = copy.deepcopy(before.graph)
    assert simplify(graph, [constant_writes_to_where])
    graph.lint()
    same(fx.GraphModule(before, graph)(x)[0], before(x)[0], bits=True)


def test_a_replacement_that_depends_on_its_node_is_refused() -> None:
    @rewrite_rule(aten.sin.default)
    def of_itself(node: fx.Node, writer: GraphWriter) -> fx.Node:
        return writer.call(aten.cos.default, node)

    with pytest.raises(AssertionError, match="depends on the node that it replaces"):
        simplify(make_fx(lambda x: [torch.sin(x)], tracing_mode="fake")(plain(2)).graph, [of_itself])


def test_an_operator_that_runs_once_for_equal_operands_has_the_fake_values_of_each_call() -> None:
    """Operands of another layout or dtype are not equal; each result has its own memory."""
    x = plain(2, 3, 5, 4)
    module = make_fx(lambda x: [x, x + 1, x.half(), x.transpose(2, 3).contiguous().transpose(2, 3)], tracing_mode="fake")(x)
    writer = GraphWriter(module.graph).move_before(module.graph.output_node())
    operands = [*outputs_of(module.graph), *module.graph.find_nodes(op="placeholder")]
    found, expected = (
        [value for q in operands for value in call(ATTENTION_BACKWARD, *6 * (q,), is_causal=True).meta["val"]]
        for call in (writer.call_alike, writer.call)
    )
    metadata = [[(value.shape, value.stride(), value.dtype, value.device) for value in values] for values in (found, expected)]
    assert metadata[0] == metadata[1]
    assert len({value.untyped_storage()._cdata for value in found}) == len(found)


# -- patterns


def last_operator(function: Callable[..., object], *inputs: Tensor) -> fx.Node:
    graph = make_fx(function, tracing_mode="fake")(*inputs).graph
    *_, last = (node for node in graph.nodes if node.op == "call_function")
    return last


SUM_OF_ONE = op(aten.add.Tensor, "x", op(aten.neg.default, "x"))


@pytest.mark.parametrize(
    ("function", "is_match"),
    [
        (lambda x, y: x + x.neg(), True),
        (lambda x, y: x.neg() + x, True),  # an addition commutes
        (lambda x, y: y + x.neg(), False),  # a name is one value
        (lambda x, y: torch.add(x, x.neg(), alpha=2), False),  # an argument that is not written has its default
    ],
)
def test_a_pattern_matches(function: Callable[..., Tensor], is_match: bool) -> None:
    assert (SUM_OF_ONE.match(last_operator(function, plain(2), plain(2))) is not None) == is_match


def test_dimensions_are_compared_from_the_first() -> None:
    pattern = op(aten.sum.dim_IntList, op(aten.amax.default, "x", ["dim"], True), ["dim"], True)
    node = last_operator(lambda x: x.amax(-1, keepdim=True).sum(1, keepdim=True), plain(2, 3))
    assert pattern.match(node, {"dim": 1}) and not pattern.match(node, {"dim": 0})


@pytest.mark.parametrize(
    ("function", "is_match"),
    [
        (lambda p, x: (p.t() @ x, p.t() @ x), True),
        (lambda p, x: (p.t() @ x, p.sin()), False),  # another use
        (lambda p, x: (p.t() @ p,), False),  # the value is in the place of another
    ],
)
def test_all_uses_of_a_value_match(function: Callable[..., object], is_match: bool) -> None:
    graph = make_fx(function, tracing_mode="fake")(plain(3, 3), plain(3, 3)).graph
    value = next(iter(graph.find_nodes(op="placeholder")))
    roots = {"products": op(aten.mm.default, op(aten.t.default, "p"), "x")}
    assert (match_uses("p", value, roots, {}) is not None) == is_match


# -- each rule as text


def pair(one: Callable[..., object], other: Callable[..., object], *inputs: Tensor) -> tuple[Case, Case]:
    return Case(one, inputs), Case(other, inputs)


def fused(dropout: float) -> Case:
    return Case(lambda q: aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, dropout, True)[0], (plain(2, 3, 5, 4),))


def of_the_flash_package(softcap: float) -> Case:
    return Case(lambda q: flash_attn_func(q, q, q, causal=True, softcap=softcap), (plain(2, 5, 3, 8),))


def of_documents(softcap: float) -> Case:
    ends = torch.tensor([0, 2, 5], dtype=torch.int32)
    how = {"causal": True, "softcap": softcap}
    return Case(lambda q, ends: flash_attn_varlen_func(q, q, q, ends, ends, 3, 3, **how), (plain(5, 3, 8), ends))


def scanned(x: Tensor, a: Tensor, b: Tensor, dlast: Tensor) -> tuple[Tensor, ...]:
    """A scan, and its backward."""
    y, last = selective(x, x, a, b, b)
    dx, _, da, *_, dfirst = selective_backward(y, dlast, x, x, a, b, b)
    return y, last, dx, da, dfirst


def read_by_others(q: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """Another operator reads values that an operator saves in blocks of rows."""
    y, _, saved = blocks(q, q, q, g, 0.5, None, False)
    return y, saved.sin()


def number_of(function: Callable[..., tuple[Tensor, ...]], *rows: Tensor) -> int:
    """Return the number of a function of two rows, traced on such rows and a shared operand."""
    return register_combine_graph(traced_on_rows(function, list(rows)).graph, 1)


def affine(by: Tensor, plus: Tensor, by_next: Tensor, plus_next: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return by * by_next, by_next * plus + plus_next * weight


def combined(x: Tensor, y: Tensor, dx: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Rows combined by a tree, and its backward; one result has no gradient."""
    number = number_of(affine, x[0], y[0], 2 * x[0], 2 * y[0], weight)
    made = TREE_SCAN([x, y], [weight], number)
    gradients = SCAN_BACKWARD([dx, None], [x, y], [weight], number)
    return made[1], gradients[0], gradients[2]


def of_other_rows(x: Tensor, y: Tensor, dx: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """A backward without its call."""
    return (SCAN_BACKWARD([dx, None], [x, y], [weight], number_of(affine, x[0], y[0], 2 * x[0], 2 * y[0], weight))[0],)


SHOWN: dict[str, tuple[Case, Case]] = {
    **{rule: (case, EXAMPLES[f"not {rule}"]) for rule, case in EXAMPLES.items() if not rule.startswith("not ")},
    "fuse_all_reduce_with_wait": pair(
        lambda x: wait_tensor(all_reduce(x, "sum", "0")),
        lambda x: (wait_tensor(begun := all_reduce(x, "sum", "0")), wait_tensor(begun)),
        plain(4, 3),
    ),
    "embedding_bag_to_embedding": (test_bags.forward(0), test_bags.forward(0, step=2)),
    "embedding_bag_backward_to_embedding_backward": (test_bags.backward(1), test_bags.backward(1, step=2)),
    "embedding_bag_weights_backward_to_product": (test_bags.backward(0), test_bags.backward(0, step=2)),
    "softmax_with_sink_to_attention": (
        test_attention.CASES["beside"],
        test_attention.CASES["probabilities are shown"],
    ),
    "sdpa_to_attention": (fused(0.0), fused(0.1)),
    "flash_attn_to_attention": (of_the_flash_package(0.0), of_the_flash_package(30.0)),
    "flash_attn_varlen_to_attention": (of_documents(0.0), of_documents(30.0)),
    "stateful_operator_to_recurrence": (
        Case(scanned, (plain(2, 5, 3), plain(3, 4), plain(2, 5, 4), plain(2, 3, 4))),
        Case(read_by_others, (plain(2, 6, 1, 3), plain(2, 6, 1))),
    ),
    "associative_scan_to_recurrence": pair(combined, of_other_rows, plain(5, 3), plain(5, 3), plain(5, 3), plain(3)),
}
if not IS_STAND_IN:  # the package itself traces for GPUs only
    SHOWN = {name: cases for name, cases in SHOWN.items() if "flash_attn" not in name}
SHOWN_ELSEWHERE = {
    "decompose_flex_attention",
    "nested_getitem_to_item_at",
    "scan_to_recurrence",
    "causal_conv1d_to_recurrence",
    "index_by_list_to_slices",
    "index_put_by_list_to_slice_backward",
}  # of functions: test_flex, test_whole, test_scan_operators, test_stateful, test_constant_places


def listing(graph: fx.Graph) -> str:
    return "\n".join(
        f"    {node.name} = {call_text(node)}"
        + (f"  # {dtype_text(node.meta['val'].dtype)}{shape_text(node.meta['val'])}" if is_tensor(node) else "")
        for node in graph.nodes
        if node.op == "call_function"
    )


def prepared(case: Case, rule: RewriteRule) -> fx.Graph:
    """A traced graph, simplified by all other rules."""
    before, _ = graphs(case)
    graph = copy.deepcopy(before.graph)
    graph.output_node().args = (tuple(graph.output_node().args[0]),)  # type: ignore[arg-type]
    simplify(graph, [other for other in RULES if other is not rule])
    return graph


def test_every_rule_is_shown() -> None:
    assert SHOWN.keys() | SHOWN_ELSEWHERE == {name for name in BY_NAME if IS_STAND_IN or "flash_attn" not in name}
    assert all(" -> " in rule.text for rule in BY_NAME.values())


@pytest.mark.parametrize("name", SHOWN)
def test_equation(name: str, golden: Callable[[str], None]) -> None:
    rule = BY_NAME[name]
    graph, other = (prepared(case, rule) for case in SHOWN[name])
    before, unchanged = listing(graph), listing(other)
    simplify(graph, [rule])
    simplify(other, [rule])
    after = listing(graph)
    assert after != before
    assert listing(other) == unchanged
    golden(f"{rule.text}\n\nbefore\n{before}\nafter\n{after}\nstays as it is\n{unchanged}\n")
