"""PyTorch's `associative_scan` streams: chunks hand on the blocks that stand behind their rows, and their gradients back.

Dynamo traces it as a tree of pairs of rows: what is read as one and what is not, and how chunks of one are combined.
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
from torch.utils.checkpoint import checkpoint

from streamfx.runtime.associative import Associative, AssociativeBackward
from streamfx.runtime.prefix_scan import levels_behind, pulled_back, scanned
from tests.support import decoders
from tests.support.later_sizes import compare_sizes
from tests.support.spread import only
from tests.test_recurrences import LENGTH, WIDTH, Mixed, Mixer, all_in_rows, compared, operators

pytestmark = pytest.mark.compiled

Rows = tuple[Tensor, ...]


def along(combine: Callable[[Any, Any], Any], rows: Any, dim: int = 1, **more: Any) -> Any:
    return associative_scan(combine, rows, dim, combine_mode="generic", **more)


def affine(left: Rows, right: Rows) -> Rows:
    """What a state is multiplied by, and what is added to it."""
    return left[0] * right[0], right[0] * left[1] + right[1]


def decayed(m: Mixed, x: Tensor, dim: int = 1, **more: Any) -> Tensor:
    return m.out(along(affine, (m.gate(x).sigmoid(), x), dim, **more)[1])


def weighted(m: Mixed, x: Tensor) -> Tensor:
    """Weights inside of the function, which is not associative at all: the tree says who is combined with whom."""
    return m.out(along(lambda a, b: (0.3 * a @ m.gate.weight.t() - b * m.mu).sin() * m.first, x))


def around_attention(m: Mixed, x: Tensor) -> Tensor:
    q, k, v = m.up(decayed(m, x)).unflatten(-1, (3, 1, WIDTH)).permute(2, 0, 3, 1, 4)
    return decayed(m, x + F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])


def of_positions(m: Mixed, x: Tensor) -> Tensor:
    """A leaf that all sequences share: its rows have fewer dimensions."""
    shared = m.first * torch.arange(x.shape[1], dtype=x.dtype)[:, None].cos()
    made, _ = along(lambda a, b: (a[0] * b[1] + b[0], a[1] * b[1]), (x.transpose(0, 1), shared), 0)
    return m.out(made.transpose(0, 1))


def signed(m: Mixed, x: Tensor) -> Tensor:
    """Blocks keep signs of zeros: a product of rows is -0 in one place and 0 in another."""
    steps = (torch.arange(x.shape[1]) % 3 == 1).to(x.dtype)[None, :, None] * x.sign().detach()
    made = along(lambda a, b: a * b, steps * m.gate(x))
    return m.out(made + torch.copysign(m.mu, made))


STREAMS: dict[str, Mixer] = {
    "weighted": weighted,
    "around attention": around_attention,
    "of positions": of_positions,
    "signs of zeros": signed,
    # of whole numbers: which of two equal ones gets the gradient depends on who was compared with whom
    "maxima": lambda m, x: m.out(x * along(torch.maximum, (2 * m.gate(x)).round() + m.mu - m.mu.detach() + x)),
    "side by side": lambda m, x: decayed(m, x) * weighted(m, x) + decayed(m, x),
    "made again": lambda m, x: checkpoint(lambda x: decayed(m, x), x, use_reentrant=False),
    "of the same rows": lambda m, x: m.out(along(affine, (x, x))[1]),
    "partly detached": lambda m, x: m.out(along(lambda a, b: a.detach().cos() * b + a, x)),
}


@pytest.mark.parametrize("name", only(["weighted", "around attention", "of positions"], STREAMS))
def test_rows_are_combined_chunk_by_chunk(name: str) -> None:
    report = compared(STREAMS[name], chunk_size=4, also=(1, 7, LENGTH))
    for kind in (Associative, AssociativeBackward):
        assert all_in_rows(report, operators(report, kind))


def integers_first(m: Mixed, x: Tensor) -> Tensor:
    """A leaf of whole numbers gets no gradient; by the same function, a later scan's leaf that is trained gets one."""
    kept = along(affine, ((x.detach() > 0).long(), x))[1]
    return m.out(along(affine, (m.gate(kept).sigmoid(), x))[1])


def given_integers_first(m: Mixed, x: Tensor) -> Tensor:
    def made(factor: Tensor) -> Any:
        return along(lambda left, right: left * factor + right, x)

    return m.out(made(torch.ones((), dtype=torch.int64)) + made(m.mu.mean()))


@pytest.mark.parametrize(
    "mixer", only([integers_first], [integers_first, given_integers_first]), ids=lambda mixer: mixer.__name__
)
def test_functions_on_other_dtypes_are_other_functions(mixer: Mixer) -> None:
    assert operators(compared(mixer, chunk_size=4, streams=None), Associative)


@pytest.mark.long
@pytest.mark.parametrize(("how", "streams"), [({"reverse": True}, False), ({"dim": 2}, None)], ids=str)
def test_what_hands_on_nothing_from_chunk_to_chunk_is_exact(how: dict[str, Any], streams: bool | None) -> None:
    """From the last row to the first, and over the width."""
    compared(lambda m, x: decayed(m, x, **how), chunk_size=3, streams=streams)


def test_types_that_are_switched_around_a_model() -> None:
    """Gradients differ by what rounding to bfloat16 makes of other orders of sums; what is cast is seen by the results."""
    x = torch.randn(2, 7, 4, 4)
    model = torch.compile(lambda x: along(lambda a, b: (a @ b).sin(), x), backend="streambp", options={"chunk_size": 3})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model(x), along(lambda a, b: (a @ b).sin(), x))


def test_types_that_the_model_switches_inside() -> None:
    """The function is not looked into where the graph itself casts operands; around the graph it sees the casts."""

    def cast(m: Mixed, x: Tensor) -> Tensor:
        weight = m.gate.weight.float()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            made: Tensor = along(lambda a, b: a @ weight + b, x.float()).to(x.dtype)
        return m.out(made)

    assert not operators(compared(cast, chunk_size=3, streams=None, tolerance=1e-2), Associative)


@pytest.mark.long
def test_other_lengths_and_batches_later() -> None:
    """The tree of another length has other levels: each is compiled. What is compiled for one batch is for any."""
    options = {"chunk_size": 4, "loss_chunk_size": 4, "strict": True}
    sizes = ((2, 11), (2, 7), (3, 7), (4, 7))
    compare_sizes(lambda: decoders.made(lambda: Mixed(decayed)), "streambp", sizes, options=options)


COMBINES: dict[str, Callable[[Rows, Rows], Rows]] = {
    "apart": lambda left, right: (left[0] + right[0], left[1] + right[1]),
    "of the right": lambda left, right: (right[0] * 1.0, right[1] * 1.0),
    "affine": affine,
    # the third leaf reaches the first one in two steps
    "in turn": lambda left, right: (left[0] + right[1], left[1] + right[2].detach() + left[2], left[2] * right[2]),
}
UNUSED = [("apart", 0, 6), ("of the right", 1, 3), ("affine", 0, 2), ("in turn", 0, 6), ("in turn", 1, 1)]


@pytest.mark.parametrize(("combine", "used", "length"), only(UNUSED[:1], UNUSED))
def test_a_leaf_that_reaches_no_loss_has_no_gradient(combine: str, used: int, length: int) -> None:
    """Zeros would be something else: an optimizer that decays weights moves what has a gradient of zeros."""

    def mixed(m: Mixed, x: Tensor) -> Tensor:
        return m.out(along(COMBINES[combine], (m.gate(x), x * m.mu, x.cos())[: 3 if combine == "in turn" else 2])[used])

    compared(mixed, length=length, streams=None)


# -- what is read as a tree, and what is not


def by_hand(x: Tensor, function: Callable[[int], Any], shown: list[Tensor], first: int = 0, level: int = 0) -> Tensor:
    """The tree of one leaf that PyTorch makes, with a function for each level; even rows may begin somewhere else."""
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
    """A tree by hand, whose second level may have another function."""

    def product(one: Tensor, other: Tensor) -> Tensor:
        return one * other.cos()

    def mixer(m: Mixed, x: Tensor) -> Tensor:
        shown: list[Tensor] = []
        made = by_hand(x.movedim(1, 0), lambda level: second if second and level == 1 else product, shown, first)
        return m.out(made.movedim(0, 1) + (shown[-1].sum() if shows else 0))

    return mixer


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


def of(combine: Callable[[Tensor, Tensor], Tensor]) -> Mixer:
    return lambda m, x: m.out(along(combine, x))


OTHERS: dict[str, Mixer] = {
    "another function on the second level": levels(lambda one, other: one / (2 + other.sin())),
    "the other way round on the second level": levels(lambda one, other: other * one.cos()),
    "from another row on": levels(first=1),
    "a level that is a result": levels(shows=True),
    "a function that reads by strides": of(lambda a, b: torch.as_strided(a, a.shape, a.stride()).sin() + b),
    "a function with a gradient of its own": of(lambda a, b: doubled(a) + b),
    "a function that writes": of(lambda a, b: (a * 1).mul_(b)),
    "inside of another transformation": lambda m, x: m.out(torch.vmap(lambda row: along(lambda a, b: a.sin() + b, row, 0))(x)),
}


@pytest.mark.long
def test_a_tree_by_hand_is_one_too() -> None:
    assert operators(compared(levels(), chunk_size=3), Associative)


@pytest.mark.parametrize("name", OTHERS)
def test_what_only_looks_like_one(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Levels above the one that differs may be a tree of their own, of fewer rows."""
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


def again(first: int, rows: list[Tensor], given: Any, blocks: dict[int, list[Tensor]]) -> Any:
    return scanned(many, rows, blocks, first)


@pytest.mark.parametrize("length", [1, 2, 5, 8, 13])
def test_each_row_is_combined_as_pytorch_does(length: int) -> None:
    """To the last bit; behind a chunk stand the blocks of the binary number. And gradients of blocks are handed back."""
    rows, cotangents = draw(length), [leaf[:length].detach() for leaf in draw(length + 100)]
    truth = along(lambda a, b: tuple(many(a, b)), tuple(rows), 0) if length > 1 else rows
    gradients = torch.autograd.grad(truth, rows, cotangents) if length > 1 else cotangents
    for size in range(1, length + 1):
        chunks = [slice(first, min(first + size, length)) for first in range(0, length, size)]
        before: list[dict[int, list[Tensor]]] = [{}]
        made = []
        for own in chunks:
            part, blocks = scanned(many, [leaf[own].detach() for leaf in rows], before[-1], own.start)
            made.append(part)
            before.append(blocks)
            assert sorted(blocks) == levels_behind(own.stop)
        assert all(torch.equal(torch.cat(parts), whole) for parts, whole in zip(zip(*made, strict=True), truth, strict=True))
        left: Any = {}
        back: list[Any] = []
        for own, blocks in zip(reversed(chunks), before[-2::-1], strict=True):
            given, after = [leaf[own] for leaf in rows], [leaf[own] for leaf in cotangents]
            handed, left = pulled_back(partial(again, own.start), given, [], blocks, after, left)
            back.insert(0, handed)
        torch.testing.assert_close(
            [torch.cat(parts) for parts in zip(*back, strict=True)], list(gradients), rtol=1e-13, atol=1e-13
        )
