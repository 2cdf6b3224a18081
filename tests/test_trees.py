"""Trees of pairs of rows: what is read as an associative scan and what is not, and how chunks of one are combined."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from streamfx.frontend.associative_scan_match import with_trees
from streamfx.runtime.associative import TREE_SCAN
from streamfx.runtime.prefix_scan import levels_behind, pulled_back, scanned
from tests.test_associative_scans import along, compared, scans
from tests.test_recurrences import LENGTH, Mixed, Mixer

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
