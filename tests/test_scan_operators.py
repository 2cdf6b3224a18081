"""PyTorch's `associative_scan` and `scan` stream: chunks pass on the blocks before their end, and the gradients of these blocks.

Dynamo traces a scan as a tree of pairs of rows. What matches such a tree, and how chunks of it are combined.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.while_loop import while_loop
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import streamfx
from streamfx.ir.facts import known
from streamfx.runtime.associative import Associative, AssociativeBackward
from streamfx.runtime.custom_scan import StatefulRecurrence
from streamfx.runtime.prefix_scan import block_levels, scan_levels, vjp_of_scan
from tests.support.exactness import assert_small, errors, outcome, recorder
from tests.support.mixers import LENGTH, WIDTH, Mixed, Mixer, all_in_rows, compared, mixed, operators, tokens, zeros
from tests.support.scans import if_aliases_compile, scan
from tests.support.spread import only
from tests.support.tables import named_cases

pytestmark = pytest.mark.compiled

Rows = tuple[Tensor, ...]


def along(combine: Callable[[Any, Any], Any], rows: Any, dim: int = 1, **more: Any) -> Any:
    return associative_scan(combine, rows, dim, combine_mode="generic", **more)


def affine(left: Rows, right: Rows) -> Rows:
    """The factor of a state, and the number that is added to it."""
    return left[0] * right[0], right[0] * left[1] + right[1]


def decayed(m: Mixed, x: Tensor) -> Tensor:
    return m.out(along(affine, (m.gate(x).sigmoid(), x))[1])


def weighted(m: Mixed, x: Tensor) -> Tensor:
    """Weights inside the function, which is not associative: the tree defines which rows are combined."""
    return m.out(along(lambda a, b: (0.3 * a @ m.gate.weight.t() - b * m.mu).sin() * m.first, x))


def around_attention(m: Mixed, x: Tensor) -> Tensor:
    q, k, v = m.up(decayed(m, x)).unflatten(-1, (3, 1, WIDTH)).permute(2, 0, 3, 1, 4)
    return decayed(m, x + F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])


def of_positions(m: Mixed, x: Tensor) -> Tensor:
    """A leaf that all sequences share: its rows have fewer dimensions."""
    shared = m.first * torch.arange(x.shape[1], dtype=x.dtype)[:, None].cos()
    made, _ = along(lambda a, b: (a[0] * b[1] + b[0], a[1] * b[1]), (x.transpose(0, 1), shared), 0)
    return m.out(made.transpose(0, 1))


STREAMS: dict[str, Mixer] = named_cases("streams", globals(), "m, x")


@pytest.mark.parametrize("name", only(["weighted", "around attention", "of positions"], STREAMS))
def test_a_scan_streams(name: str) -> None:
    report = compared(STREAMS[name], chunk_size=4, also=(1, 7, LENGTH))
    for kind in (Associative, AssociativeBackward):
        assert all_in_rows(report, operators(report, kind))


def integers_first(m: Mixed, x: Tensor) -> Tensor:
    """A leaf of integers gets no gradient; a trained leaf of a later scan with the same function gets one."""
    kept = along(affine, ((x.detach() > 0).long(), x))[1]
    return m.out(along(affine, (m.gate(kept).sigmoid(), x))[1])


def test_a_function_is_another_one_for_other_dtypes() -> None:
    assert operators(compared(integers_first, chunk_size=4, streams=None), Associative)


def test_autocast_around_a_model() -> None:
    """Sums in another order round to other gradients in bfloat16, so the results are compared."""
    x = torch.randn(2, 7, 4, 4)
    model = torch.compile(lambda x: along(lambda a, b: (a @ b).sin(), x), backend="streambp", options={"chunk_size": 3})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model(x), along(lambda a, b: (a @ b).sin(), x))


def test_autocast_inside_a_model() -> None:
    """The graph casts operands, so the scan does not match."""

    def cast(m: Mixed, x: Tensor) -> Tensor:
        weight = m.gate.weight.float()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            made: Tensor = along(lambda a, b: a @ weight + b, x.float()).to(x.dtype)
        return m.out(made)

    assert not operators(compared(cast, chunk_size=3, streams=None, tolerance=1e-2), Associative)


@pytest.mark.parametrize("used", only([0], [0, 1]))
def test_a_leaf_that_reaches_no_loss_has_no_gradient(used: int) -> None:
    """Zeros would differ: an optimizer with weight decay changes a parameter whose gradient is zero."""

    def combine(left: Rows, right: Rows) -> Rows:
        return left[0] + right[0], left[1] + right[1].detach() * left[1]

    compared(lambda m, x: m.out(along(combine, (m.gate(x), x * m.mu))[used]), length=6, streams=None)


def test_compilation_saves_nothing_for_checkpointing() -> None:
    """Checkpointing counts the tensors that a call saves, and compares a call that compiles with one that does not."""
    model = torch.compile(lambda x: along(lambda a, b: a * b.cos() + b, x).sum(), backend="streambp", options={"chunk_size": 5})
    x, other = (torch.arange(26.0, dtype=torch.float64).reshape(2, 13, 1).requires_grad_() for _ in range(2))
    checkpoint(model, x, use_reentrant=False).backward()  # type: ignore[no-untyped-call]
    model(other).backward()
    assert x.grad is not None and other.grad is not None and torch.equal(x.grad, other.grad)


# -- graphs that match a tree


def by_hand(x: Tensor, function: Callable[[int], Any], shown: list[Tensor], first: int = 0, level: int = 0) -> Tensor:
    """PyTorch's tree for one leaf, with a function for each level; even rows may begin at another row."""
    if len(x) < 2:
        return x
    cut = torch.ops.aten.slice

    def combined(one: Tensor, other: Tensor) -> Tensor:
        made: Tensor = torch.vmap(function(level), in_dims=(0, 0), out_dims=0)(one, other)
        return made

    pairs = combined(cut(x, 0, 0, -1, 2), cut(x, 0, 1, None, 2))
    odds = by_hand(pairs, function, shown, first, level + 1)
    shown.append(pairs)
    evens = combined(cut(odds, 0, 0, -1) if len(x) % 2 == 0 else odds, cut(x, 0, 2, None, 2))
    start = cut(x, 0, first, first + 1)
    evens = torch.cat([start, evens], dim=0) if len(evens) else start
    if len(evens) == len(odds):
        return torch.flatten(torch.stack([evens, odds], dim=1), start_dim=0, end_dim=1)
    odds = F.pad(odds, [0] * (2 * x.dim() - 1) + [1])
    return cut(torch.flatten(torch.stack([evens, odds], dim=1), start_dim=0, end_dim=1), 0, 0, len(x))


def levels(second: Any = None, first: int = 0, shows: bool = False) -> Mixer:
    """A tree whose second level may have another function."""

    def product(one: Tensor, other: Tensor) -> Tensor:
        return one * other.cos()

    def mixer(m: Mixed, x: Tensor) -> Tensor:
        shown: list[Tensor] = []
        made = by_hand(x.movedim(1, 0), lambda level: second if second and level == 1 else product, shown, first)
        return m.out(made.movedim(0, 1) + (shown[-1].sum() if shows else 0))

    return mixer


class Doubled(torch.autograd.Function):
    """Its gradient is not its derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0]


@torch._dynamo.allow_in_graph  # type: ignore[untyped-decorator]
def doubled(x: Tensor) -> Tensor:
    made: Tensor = Doubled.apply(x)
    return made


def of(combine: Callable[[Tensor, Tensor], Tensor]) -> Mixer:
    return lambda m, x: m.out(along(combine, x))


OTHERS: dict[str, Mixer] = named_cases("other graphs", globals())


@pytest.mark.parametrize("name", OTHERS)
def test_other_graphs_do_not_match(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Levels above the one that differs may match as a tree of fewer rows."""
    made = operators(compared(OTHERS[name], chunk_size=3, streams=None), Associative)
    assert "the search for them failed" not in caplog.text
    assert all(node.target.plan.length < LENGTH for node in made)  # type: ignore[union-attr]


# -- the tree itself


def many(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    """Not associative."""
    return [left[0] * right[0] - left[1].cos(), (right[0] * left[1] + right[1]).sin()]


def draw(rows: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return [torch.randn(rows, 3, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(2)]


def recomputed(first: int, rows: list[Tensor], given: Any, blocks: dict[int, list[Tensor]]) -> Any:
    return scan_levels(many, rows, blocks, first)


@pytest.mark.parametrize("length", [1, 2, 5, 8, 13])
def test_rows_are_combined_as_in_pytorch(length: int) -> None:
    """To the last bit. A chunk passes on a block for each bit of the number of rows before its end, and gets their gradients."""
    rows, cotangents = draw(length), [leaf[:length].detach() for leaf in draw(length + 100)]
    truth = along(lambda a, b: tuple(many(a, b)), tuple(rows), 0) if length > 1 else rows
    gradients = torch.autograd.grad(truth, rows, cotangents) if length > 1 else cotangents
    for size in range(1, length + 1):
        chunks = [slice(first, min(first + size, length)) for first in range(0, length, size)]
        before: list[dict[int, list[Tensor]]] = [{}]
        made = []
        for own in chunks:
            part, blocks = scan_levels(many, [leaf[own].detach() for leaf in rows], before[-1], own.start)
            made.append(part)
            before.append(blocks)
            assert sorted(blocks) == block_levels(own.stop)
        assert all(torch.equal(torch.cat(parts), whole) for parts, whole in zip(zip(*made, strict=True), truth, strict=True))
        left: Any = {}
        back: list[Any] = []
        for own, blocks in zip(reversed(chunks), before[-2::-1], strict=True):
            given, after = [leaf[own] for leaf in rows], [leaf[own] for leaf in cotangents]
            handed, left = vjp_of_scan(partial(recomputed, own.start), given, [], blocks, after, left)
            back.insert(0, handed)
        torch.testing.assert_close(
            [torch.cat(parts) for parts in zip(*back, strict=True)], list(gradients), rtol=1e-13, atol=1e-13
        )


# -- `scan`: its carry goes from chunk to chunk, its gradient back; a `while_loop` falls back

# PyTorch refuses a step if autograd saves one of its results for another: each step here returns a new state.


def decayed_by_scan(m: Mixed, x: Tensor) -> Tensor:
    """Linear in its state; rows along dimension 1."""

    def step(state: Tensor, row: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        state = row[0] * state + row[1]
        return state, state.tanh()

    return m.out(scan(step, zeros(x), (m.gate(x).sigmoid(), x), dim=1)[1])


def cell(m: Mixed, x: Tensor) -> Tensor:
    """A product in each step, with weights that all rows share, and a learned first state."""

    def step(state: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        return 0.5 * state + torch.tanh(state @ m.gate.weight.t() + m.gate.bias + row), state * m.mu

    return m.out(scan(step, m.first.expand(x.shape[0], WIDTH).clone(), x, dim=1)[1])


def several(m: Mixed, x: Tensor) -> Tensor:
    """A matrix, a vector, and a row counter of another type. One result repeats an operand, another is equal for all rows."""

    def step(states: tuple[Tensor, ...], rows: tuple[Tensor, Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        (outer, sums, count), (row, other) = states, rows
        made = (outer.sum(1) * row + sums / (count + 1)).softmax(-1)
        states = 0.9 * outer + row.unsqueeze(2) * row.unsqueeze(1), (sums * m.mu + row).sin(), count + 1
        return states, (made, other.clone(), m.mu.exp())

    first = x.new_zeros(x.shape[0], WIDTH, WIDTH), zeros(x), torch.zeros(1, dtype=torch.float32)
    made = scan(step, first, (x, m.gate(x)), dim=1)[1]
    return m.out(made[0] * made[1] + made[2].t())


def side_by_side(m: Mixed, x: Tensor) -> Tensor:
    return decayed_by_scan(m, x) * cell(m, x)


@pytest.mark.parametrize("mixer", [side_by_side, pytest.param(several, marks=if_aliases_compile)])
def test_a_scan_with_a_state_streams(mixer: Mixer) -> None:
    report = compared(mixer, chunk_size=4, also=(1, 11))
    assert all_in_rows(report, operators(report, StatefulRecurrence))
    if mixer is side_by_side:  # PyTorch's backward reads a weight's transpose from a stack with one for each row
        found = tree_leaves([node.meta.get("val") for node in report.facts[0].joint.nodes])
        assert max(item.numel() for item in found if isinstance(item, Tensor)) < LENGTH * WIDTH * WIDTH


def the_last_state(m: Mixed, x: Tensor) -> Tensor:
    """It leaves the loop after the last chunk."""
    state, rows = scan(lambda state, row: (0.5 * (state + row).tanh(), row * state), zeros(x), x, dim=1)
    return m.out(rows) + m.gate(state)[:, None]


def signs(m: Mixed, x: Tensor) -> Tensor:
    """The last state is a zero with a sign, which a sum over chunks would lose."""
    keep = torch.ones_like(x) * (torch.arange(x.shape[1]) < x.shape[1] - 1)[:, None]
    last, made = scan(lambda s, r: ((0.9 * s + r[0]) * r[1], s * r[0]), zeros(x), (x, keep), dim=1)
    return m.out(made) + torch.copysign(m.mu, last)[:, None]


@pytest.mark.parametrize("mixer", [the_last_state, signs], ids=lambda mixer: mixer.__name__)
def test_a_last_state(mixer: Mixer) -> None:
    assert len(operators(compared(mixer, chunk_size=3, also=(1, LENGTH), streams=None), StatefulRecurrence)) == 2


def test_a_step_that_draws_random_numbers_falls_back() -> None:
    def drawn(m: Mixed, x: Tensor) -> Tensor:
        return m.out(scan(lambda state, row: (F.dropout(state, 0.5) + row, state * row), zeros(x), x, dim=1)[1])

    torch._dynamo.reset()
    explained = streamfx.explain(mixed(drawn), **tokens(length=6), chunk_size=2)
    assert "scan calls functions, for which no rule exists" in str(explained)


def test_a_step_that_reads_by_strides_falls_back() -> None:
    """Rows of a chunk have other strides than rows of the full sequence."""

    def step(state: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        first = torch.as_strided(row, (2, WIDTH), row.stride())
        return 0.5 * (state + row).tanh() + first.sum(0), state * first.mean(0)

    def strided(m: Mixed, x: Tensor) -> Tensor:
        return m.out(scan(step, zeros(x), m.gate(x).sin(), dim=1)[1])

    assert not operators(compared(strided, batch=4, chunk_size=4, streams=None), StatefulRecurrence)


def turned(m: Mixed, x: Tensor) -> Tensor:
    """The loop carries all rows of the result, too; its inputs may not share memory."""
    rows, length = m.gate(x).clone(), x.shape[1]

    def turn(t: Tensor, made: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        state = (0.9 * state + rows.index_select(1, t.view(1)).squeeze(1)).tanh()
        return t + 1, torch.where((torch.arange(length) == t)[None, :, None], state.unsqueeze(1), made), 1.0 * state

    start = torch.zeros((), dtype=torch.int64), torch.zeros_like(x), zeros(x)
    return m.out(while_loop(lambda t, *_: t < length, turn, start)[1])


@pytest.mark.parametrize("chunk", ["auto", 4])
def test_a_while_loop_falls_back_and_the_rest_streams(chunk: int | str) -> None:
    """The number of iterations is known only at run time, and the chunk size is chosen before."""
    own, eager = mixed(turned), mixed(turned)
    backend = recorder(chunk_size=chunk, loss_chunk_size=chunk)
    truth = outcome(eager, eager, tokens())
    compiled = torch.compile(own, backend=backend, fullgraph=True)  # without, AOTAutograd itself refuses it
    assert_small(errors(outcome(compiled, own, tokens()), truth), 1e-11, "while_loop")
    (facts,) = backend.facts
    assert not facts.analysis_error and len(known(facts.program).loops) > 2
    assert any("while_loop" in reason for reason in facts.reasons())
