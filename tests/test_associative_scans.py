"""PyTorch's `associative_scan` streams: chunks hand on the blocks that stand behind their rows, and their gradients back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._higher_order_ops.associative_scan import associative_scan
from torch.utils.checkpoint import checkpoint

from streamfx.frontend.backend import Compilation
from streamfx.ir.facts import StorageClass
from streamfx.options import Options
from streamfx.runtime.associative import Associative, AssociativeBackward
from tests.support import decoders, layouts
from tests.support.exactness import Report, compare
from tests.support.later_sizes import compare_sizes
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
    assert all(StorageClass.ROWS in facts.demand.forms[node] for node in both)


def test_layers_and_as_many_sequences_as_rows() -> None:
    compared(decayed, layers=2, length=7, batch=7, chunk_size=3, save="projections")


def integers_first(m: Mixed, x: Tensor) -> Tensor:
    """A leaf of whole numbers gets no gradient; by the same function, a later scan's leaf that is trained gets one."""
    kept = along(affine, ((x.detach() > 0).long(), x))[1]
    return m.out(along(affine, (m.gate(kept).sigmoid(), x))[1])


def given_integers_first(m: Mixed, x: Tensor) -> Tensor:
    def scanned(factor: Tensor) -> Tensor:
        return along(lambda left, right: left * factor + right, x)

    return m.out(scanned(torch.ones((), dtype=torch.int64)) + scanned(m.mu.mean()))


@pytest.mark.parametrize("mixer", [integers_first, given_integers_first], ids=lambda mixer: mixer.__name__)
def test_functions_on_other_dtypes_are_other_functions(mixer: Mixer) -> None:
    assert scans(compared(mixer, chunk_size=4, streams=None))


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
    compilations: list[Any] = []

    def backend(module: fx.GraphModule, inputs: Any) -> Any:
        compilations.append(Compilation(module, Options(chunk_size=4, loss_chunk_size=4, strict=True)))
        return compilations[-1].compile(inputs)

    compare_sizes(lambda: decoders.made(lambda: Mixed(decayed)), backend, ((2, 11), (2, 7), (3, 7), (4, 7)))
    assert len(compilations) == 3
    nodes = [[node.target for node in each.facts[-1].joint.nodes] for each in compilations]
    assert all(any(isinstance(target, Associative) for target in targets) for targets in nodes)


# -- leaves without a gradient


def apart(left: Pair, right: Pair) -> Pair:
    return left[0] + right[0], left[1] + right[1]


def of_the_right(left: Pair, right: Pair) -> Pair:
    return right[0] * 1.0, right[1] * 1.0


def in_turn(left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The third leaf reaches the first one in two steps."""
    return left[0] + right[1], left[1] + right[2].detach() + left[2], left[2] * right[2]


@pytest.mark.parametrize("length", [1, 2, 3, 6])
@pytest.mark.parametrize("combine", [apart, of_the_right, affine, in_turn])
@pytest.mark.parametrize("used", [0, 1])
def test_a_leaf_that_reaches_no_loss_has_no_gradient(combine: Callable[..., Any], used: int, length: int) -> None:
    """Zeros would be something else: an optimizer that decays weights moves what has a gradient of zeros."""

    def mixed(m: Mixed, x: Tensor) -> Tensor:
        leaves = (m.gate(x), x * m.mu, x.cos())
        return m.out(along(combine, leaves if combine is in_turn else leaves[:2])[used])

    compared(mixed, length=length, streams=None)
