"""PyTorch's `associative_scan` streams: chunks hand on the blocks that stand behind their rows, and their gradients back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._higher_order_ops.associative_scan import associative_scan
from torch.utils.checkpoint import checkpoint

from streamfx.backend import Compilation
from streamfx.ir.facts import Form
from streamfx.options import Options
from streamfx.passes.recurrences.trees import with_trees
from streamfx.runtime.associative import TREE_SCAN, Associative, AssociativeBackward
from streamfx.runtime.trees import levels_behind, pulled_back, scanned
from tests.support import decoders, layouts
from tests.support.exactness import Report, compare
from tests.support.spread import only
from tests.test_recurrences import LENGTH, WIDTH, Mixed, Mixer

Pair = tuple[Tensor, Tensor]


def along(combine: Callable[[Any, Any], Any], rows: Any, dim: int = 1, **more: Any) -> Any:
    return associative_scan(combine, rows, dim, combine_mode="generic", **more)


def affine(left: Pair, right: Pair) -> Pair:
    """What a state is multiplied by, and what is added to it."""
    return left[0] * right[0], right[0] * left[1] + right[1]


def decayed(m: Mixed, x: Tensor) -> Tensor:
    return m.out(along(affine, (m.gate(x).sigmoid(), x))[1])


def both_leaves(m: Mixed, x: Tensor) -> Tensor:
    made = along(lambda a, b: {"sum": b["by"] * a["sum"] + b["sum"], "by": a["by"] * b["by"]}, {"by": m.gate(x).cos(), "sum": x})
    return m.out(made["by"] * made["sum"])


def maxima(m: Mixed, x: Tensor) -> Tensor:
    """Of whole numbers: which of two equal ones gets the gradient depends on who was compared with whom."""
    return m.out(x * along(torch.maximum, (2 * m.gate(x)).round() + m.mu - m.mu.detach() + x))


def equal_maxima(m: Mixed, x: Tensor) -> Tensor:
    return m.out(along(torch.maximum, (m.mu * torch.ones_like(x))))


def sums_of_exponents(m: Mixed, x: Tensor) -> Tensor:
    return m.out(along(torch.logaddexp, m.gate(x)))


def matrices(m: Mixed, x: Tensor) -> Tensor:
    """A product of matrices for each row, and vectors that they are applied to."""
    turned = m.gate(x).unsqueeze(-1) * m.up(x)[..., :WIDTH].unsqueeze(-2) / WIDTH
    return m.out(along(lambda a, b: (b[0] @ a[0], (b[0] @ a[1].unsqueeze(-1)).squeeze(-1) + b[1]), (turned, x))[1])


def weighted(m: Mixed, x: Tensor) -> Tensor:
    """Weights inside of the function: all rows are given them."""
    return m.out(along(lambda a, b: (a @ m.gate.weight.t() + b * m.mu).tanh(), x))


def in_no_order(m: Mixed, x: Tensor) -> Tensor:
    """A function that is not associative at all: the tree says who is combined with whom."""
    return m.out(along(lambda a, b: (0.3 * a - b).sin() * m.first, x))


def softmaxed(m: Mixed, x: Tensor) -> Tensor:
    """A running maximum, a denominator and a numerator, of several shapes."""

    def join(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        top = torch.maximum(a[0], b[0])
        one, other = (a[0] - top).exp(), (b[0] - top).exp()
        return top, one * a[1] + other * b[1], one * a[2] + other * b[2]

    scores = m.gate(x)[..., :1]
    top, total, values = along(join, (scores, torch.ones_like(scores), x))
    return m.out(values / total + 0.1 * top)


def reset(m: Mixed, x: Tensor) -> Tensor:
    """A document begins where nothing of the rows before is kept."""
    kept = (torch.arange(x.shape[1]) % 4 != 0).to(x.dtype)[None, :, None]
    return m.out(along(affine, (m.gate(x).sigmoid() * kept, x))[1])


def counted(m: Mixed, x: Tensor) -> Tensor:
    """A leaf of whole numbers beside one that is trained."""
    numbers = torch.ones(x.shape[0], x.shape[1], dtype=torch.int64)
    count, total = along(lambda a, b: (a[0] + b[0], a[1] + b[1]), (numbers, x))
    return m.out(total / count.unsqueeze(-1))


def of_positions(m: Mixed, x: Tensor) -> Tensor:
    """A leaf that all sequences share: its rows have fewer dimensions."""
    shared = m.first * torch.arange(x.shape[1], dtype=x.dtype)[:, None].cos()
    made, _ = along(lambda a, b: (a[0] * b[1] + b[0], a[1] * b[1]), (x.transpose(0, 1), shared), 0)
    return m.out(made.transpose(0, 1))


def of_the_same_rows(m: Mixed, x: Tensor) -> Tensor:
    return m.out(along(affine, (x, x))[1])


def partly_detached(m: Mixed, x: Tensor) -> Tensor:
    return m.out(along(lambda a, b: a.detach().cos() * b + a, x))


def around_attention(m: Mixed, x: Tensor) -> Tensor:
    q, k, v = m.up(decayed(m, x)).unflatten(-1, (3, 1, WIDTH)).permute(2, 0, 3, 1, 4)
    return decayed(m, x + F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])


def two_side_by_side(m: Mixed, x: Tensor) -> Tensor:
    return decayed(m, x) * weighted(m, x) + decayed(m, x)


def made_again(m: Mixed, x: Tensor) -> Tensor:
    made: Tensor = checkpoint(lambda x: decayed(m, x), x, use_reentrant=False)
    return made


def of_fixed_decays(m: Mixed, x: Tensor) -> Tensor:
    return m.out(along(affine, (m.gate(x).sigmoid().detach(), x))[1])


STREAMS = [
    decayed,
    both_leaves,
    weighted,
    in_no_order,
    maxima,
    equal_maxima,
    around_attention,
    sums_of_exponents,
    matrices,
    softmaxed,
    reset,
    counted,
    two_side_by_side,
    made_again,
    of_the_same_rows,
    partly_detached,
    of_positions,
    of_fixed_decays,
]
OFTEN = [decayed, weighted, partly_detached, of_the_same_rows, of_positions, around_attention]


def scans(report: Report, kind: type = Associative) -> list[fx.Node]:
    return [node for facts in report.facts for node in facts.joint.nodes if isinstance(node.target, kind)]


def compared(mixer: Mixer, length: int = LENGTH, batch: int = 2, layers: int = 1, **options: Any) -> Report:
    ids = layouts.tokens(23, batch, length, 0)
    return compare(decoders.made(lambda: Mixed(mixer, layers)), {"ids": ids, "labels": ids}, **options)


@pytest.mark.parametrize("mixer", only(OFTEN, STREAMS), ids=lambda mixer: mixer.__name__)
def test_rows_are_combined_chunk_by_chunk(mixer: Mixer) -> None:
    report = compared(mixer, chunk_size=4, also=(1, 7, LENGTH))
    (facts,) = report.facts
    both = scans(report) + scans(report, AssociativeBackward)
    assert scans(report) and scans(report, AssociativeBackward)
    assert all(Form.ROWS in facts.demand.forms[node] for node in both)


def test_layers_and_as_many_sequences_as_rows() -> None:
    compared(decayed, layers=2, length=7, batch=7, chunk_size=3, save="projections")


@pytest.mark.parametrize("length", [2, 3, 8])
def test_few_rows(length: int) -> None:
    compared(weighted, length=length, chunk_size=1, also=(2, length))


def test_weights_that_are_not_trained() -> None:
    """Of what all rows are given, and of the embeddings, nobody wants a gradient."""

    def frozen() -> Mixed:
        model = Mixed(weighted)
        for weight in (model.embed.weight, model.mu, model.gate.weight):
            weight.requires_grad_(False)
        return model

    ids = layouts.tokens(23, 2, LENGTH, 0)
    compare(decoders.made(frozen), {"ids": ids, "labels": ids}, chunk_size=4, also=(1, LENGTH))


def test_from_the_last_row_to_the_first() -> None:
    """In the forward half that runs whole, and is exact."""

    def reversed_rows(m: Mixed, x: Tensor) -> Tensor:
        return m.out(along(affine, (m.gate(x).sigmoid(), x), reverse=True)[1])

    compared(reversed_rows, chunk_size=3, streams=False)


def test_a_scan_over_something_else() -> None:
    """Over the width: rows of the sequence are not combined."""
    compared(lambda m, x: m.out(along(affine, (m.gate(x).sigmoid(), x), 2)[1]), chunk_size=3, streams=None)


def test_signs_of_zeros() -> None:
    """Blocks keep them: a product of rows is -0 in one place and 0 in another."""

    def signed(m: Mixed, x: Tensor) -> Tensor:
        steps = (torch.arange(x.shape[1]) % 3 == 1).to(x.dtype)[None, :, None] * x.sign().detach()
        made = along(lambda a, b: a * b, steps * m.gate(x).detach())
        return m.out(x + torch.copysign(m.mu, made))

    compared(signed, chunk_size=3, also=(1, LENGTH))


@pytest.mark.parametrize("function", [lambda a, b: (a @ b).sin(), lambda a, b: a + b.exp()])
def test_types_that_are_switched_around_a_model(function: Any) -> None:
    """Gradients differ by what rounding to bfloat16 makes of other orders of sums; what is cast is seen by the results."""
    torch._dynamo.reset()
    x = torch.randn(2, 7, 4, 4)
    model = torch.compile(lambda x: along(function, x), backend="streambp", options={"chunk_size": 3})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model(x), along(function, x))


def test_types_that_the_model_switches_inside() -> None:
    """The function is not looked into where the graph itself casts operands; around the graph it sees the casts."""

    def cast(m: Mixed, x: Tensor) -> Tensor:
        weight = m.gate.weight.float()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            made: Tensor = along(lambda a, b: a @ weight + b, x.float()).to(x.dtype)
        return m.out(made)

    assert not scans(compared(cast, chunk_size=3, streams=None, tolerance=1e-2))


def test_other_lengths_and_batches_later() -> None:
    """The tree of another length has other levels: each is compiled. What is compiled for one batch is for any."""
    torch._dynamo.reset()
    eager, own = (decoders.made(lambda: Mixed(decayed)) for _ in range(2))
    compilations: list[Any] = []

    def backend(module: fx.GraphModule, inputs: Any) -> Any:
        compilations.append(Compilation(module, Options(chunk_size=4, loss_chunk_size=4, strict=True)))
        return compilations[-1].compile(inputs)

    model = torch.compile(own, backend=backend)
    for batch, length in ((2, 11), (2, 7), (3, 7), (4, 7)):
        ids = layouts.tokens(23, batch, length, length)
        gradients = []
        for call, kind in ((eager, eager), (model, own)):
            kind.zero_grad()
            call(ids, ids).backward()
            gradients.append({name: each.grad for name, each in kind.named_parameters() if each.grad is not None})
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-12, atol=1e-14)
    assert len(compilations) == 3
    nodes = [[node.target for node in each.facts[-1].joint.nodes] for each in compilations]
    assert all(any(isinstance(target, Associative) for target in targets) for targets in nodes)


# -- what only looks like one


Function = Callable[[Tensor, Tensor], Tensor]


def by_hand(
    x: Tensor, function: Callable[[int], Function], first: int = 0, level: int = 0, shown: list[Tensor] | None = None
) -> Tensor:
    """The tree of one leaf that PyTorch makes, with a function for each level; even rows may begin somewhere else."""
    if len(x) < 2:
        return x

    def combined(one: Tensor, other: Tensor) -> Tensor:
        made: Tensor = torch.vmap(function(level), in_dims=(0, 0), out_dims=0)(one, other)
        return made

    pairs = combined(torch.ops.aten.slice(x, 0, 0, -1, 2), torch.ops.aten.slice(x, 0, 1, None, 2))
    if shown is not None:
        shown.append(pairs)
    odds = by_hand(pairs, function, first, level + 1)
    left = torch.ops.aten.slice(odds, 0, 0, -1) if len(x) % 2 == 0 else odds
    evens = combined(left, torch.ops.aten.slice(x, 0, 2, None, 2))
    start = torch.ops.aten.slice(x, 0, first, first + 1)
    evens = torch.cat([start, evens], dim=0) if len(evens) else start
    if len(evens) == len(odds):
        return torch.flatten(torch.stack([evens, odds], dim=1), start_dim=0, end_dim=1)
    odds = F.pad(odds, [0] * (2 * x.dim() - 1) + [1])
    both = torch.flatten(torch.stack([evens, odds], dim=1), start_dim=0, end_dim=1)
    return torch.ops.aten.slice(both, 0, 0, len(x))


def product(one: Tensor, other: Tensor) -> Tensor:
    return one * other.cos()


def quotient(one: Tensor, other: Tensor) -> Tensor:
    return one / (2 + other.sin())


def turned(one: Tensor, other: Tensor) -> Tensor:
    return other * one.cos()


def shown_inside(m: Mixed, x: Tensor) -> Tensor:
    shown: list[Tensor] = []
    made = by_hand(x.movedim(1, 0), lambda level: product, shown=shown)
    return m.out(made.movedim(0, 1) + shown[0].sum())


class Doubled(torch.autograd.Function):
    """Its gradient is not the derivative of what it computes."""

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


OTHERS: dict[str, Mixer] = {
    "another function on the second level": lambda m, x: m.out(
        by_hand(x.movedim(1, 0), lambda level: quotient if level == 1 else product).movedim(0, 1)
    ),
    "the other way round on the second level": lambda m, x: m.out(
        by_hand(x.movedim(1, 0), lambda level: turned if level == 1 else product).movedim(0, 1)
    ),
    "from another row on": lambda m, x: m.out(by_hand(x.movedim(1, 0), lambda level: product, first=1).movedim(0, 1)),
    "a level that is a result": shown_inside,
    "a function that reads by strides": lambda m, x: m.out(
        along(lambda a, b: torch.as_strided(a, a.shape, a.stride()).sin() + b, x)
    ),
    "a function with a gradient of its own": lambda m, x: m.out(along(lambda a, b: doubled(a) + b, x)),
    "inside of another transformation": lambda m, x: m.out(torch.vmap(lambda row: along(lambda a, b: a.sin() + b, row, 0))(x)),
    "a function that writes": lambda m, x: m.out(along(lambda a, b: (a * 1).mul_(b), x)),
}


def test_a_tree_by_hand_is_one_too() -> None:
    assert scans(compared(lambda m, x: m.out(by_hand(x.movedim(1, 0), lambda level: product).movedim(0, 1)), chunk_size=3))


@pytest.mark.parametrize("name", OTHERS)
def test_what_only_looks_like_one(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Levels above the one that differs may be a tree of their own, of fewer rows."""
    made = scans(compared(OTHERS[name], chunk_size=3, streams=None))
    assert "the search for them failed" not in caplog.text
    assert all(node.target.plan.length < LENGTH for node in made)  # type: ignore[union-attr]


# -- the tree itself


def many(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    return [left[0] * right[0] - left[1].cos(), (right[0] * left[1] + right[1]).sin()]


def draw(rows: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return [torch.randn(rows, 3, dtype=torch.float64, generator=generator) for _ in range(2)]


def again(first: int, rows: list[Tensor], given: Any, blocks: dict[int, list[Tensor]]) -> Any:
    return scanned(many, rows, blocks, first)


def chunks(length: int, size: int) -> list[tuple[int, int]]:
    return [(first, min(first + size, length)) for first in range(0, length, size)]


@pytest.mark.parametrize("length", [1, 2, 5, 8, 13])
def test_each_row_is_combined_as_pytorch_does(length: int) -> None:
    """To the last bit, though the function is not associative; and behind a chunk stand the blocks of the binary number."""
    rows = draw(length)
    truth = along(lambda a, b: tuple(many(a, b)), tuple(rows), 0) if length > 1 else rows
    for size in range(1, length + 1):
        blocks: dict[int, list[Tensor]] = {}
        made = []
        for first, last in chunks(length, size):
            part, blocks = scanned(many, [leaf[first:last] for leaf in rows], blocks, first)
            made.append(part)
            assert sorted(blocks) == levels_behind(last)
        assert all(torch.equal(torch.cat(parts), whole) for parts, whole in zip(zip(*made, strict=True), truth, strict=True))


@pytest.mark.parametrize("length", [2, 5, 8])
def test_gradients_of_blocks_are_handed_back(length: int) -> None:
    rows, cotangents = [leaf.requires_grad_() for leaf in draw(length)], draw(length + 100)
    truth = torch.autograd.grad(along(lambda a, b: tuple(many(a, b)), tuple(rows), 0), rows, [c[:length] for c in cotangents])
    for size in range(1, length + 1):
        before: list[dict[int, list[Tensor]]] = [{}]
        for first, last in chunks(length, size):
            before.append(scanned(many, [leaf[first:last].detach() for leaf in rows], before[-1], first)[1])
        left: dict[int, list[Tensor]] = {}
        made: list[Any] = []
        for (first, last), blocks in zip(reversed(chunks(length, size)), before[-2::-1], strict=True):
            own, gradients = [leaf[first:last] for leaf in rows], [leaf[first:last] for leaf in cotangents]
            part, left = pulled_back(partial(again, first), own, [], blocks, gradients, left)
            made.insert(0, part)
        found = [torch.cat(parts) for parts in zip(*made, strict=True)]
        torch.testing.assert_close(found, list(truth), rtol=1e-13, atol=1e-13)


def test_the_operator_by_itself() -> None:
    """Where a graph runs as it stood, PyTorch calls it; a result that nobody uses has no gradient."""
    found: list[fx.GraphModule] = []

    def kept(module: fx.GraphModule, _: Any) -> Any:
        found.append(with_trees(module))
        return module.forward

    weight = torch.randn(3, dtype=torch.float64, requires_grad=True)

    def scan(one: Tensor, other: Tensor) -> Any:
        return along(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1] * weight), (one, other), 0)

    rows = [leaf.requires_grad_() for leaf in draw(6)]
    torch.compile(scan, backend=kept)(*rows)
    assert [node for node in found[0].graph.nodes if node.target is TREE_SCAN]
    for used in (slice(0, 1), slice(1, 2), slice(0, 2)):
        gradients = [
            torch.autograd.grad(
                [part.sin().sum() for part in list(made)[used]], [*rows, weight], allow_unused=True, materialize_grads=True
            )
            for made in (scan(*rows), _called(found[0], {"one": rows[0], "other": rows[1], "weight": weight}))
        ]
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-13, atol=1e-13)


def _called(module: fx.GraphModule, values: dict[str, Tensor]) -> Any:
    """A Dynamo graph on values that go by the names of its inputs."""
    names = [str(node.target) for node in module.graph.find_nodes(op="placeholder")]
    return module(*(next(value for key, value in values.items() if f"_{key}_" in f"{name}_") for name in names))
