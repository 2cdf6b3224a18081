"""Blocks of rows that loops cut out one by one and join again: recurrences over blocks, and attention inside of blocks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from streamfx.ir.joint import joint_graph
from streamfx.ir.writer import GraphWriter
from streamfx.passes.analysis.derived_axes import MOST_PARTS
from streamfx.passes.scan.strip_mine import cut_blocks, put_back
from streamfx.runtime.chunked_recurrences import Recurrence
from streamfx.tools.report.listing import call_text
from tests.support.canonical import same, special
from tests.support.decoders import VOCABULARY, Decoder, Heads
from tests.support.exactness import Report, compare
from tests.support.spread import only

aten = torch.ops.aten
BLOCK, LAYERS = 4, 2
Blocks = list[tuple[Tensor, Tensor, Tensor]]


def sliced(q: Tensor, k: Tensor, v: Tensor) -> Blocks:
    starts = range(0, q.shape[2], BLOCK)
    return [(q[:, :, i : i + BLOCK], k[:, :, i : i + BLOCK], v[:, :, i : i + BLOCK]) for i in starts]


def split(q: Tensor, k: Tensor, v: Tensor) -> Blocks:
    return list(zip(*(part.split(BLOCK, 2) for part in (q, k, v)), strict=True))


class CutHeads(Heads):
    """Linear attention: a state for what is before a block, rows that meet at once inside of it."""

    cut: staticmethod[..., Blocks] = staticmethod(sliced)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        state, made = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]), []
        for a, b, c in self.cut(q, k, v):
            made.append(a @ state + (a @ b.mT).tril() @ c)
            state = 0.9 * state + b.mT @ c
        return torch.cat(made, 2)


class SplitHeads(CutHeads):
    cut = staticmethod(split)


class BehindHeads(Heads):
    """Rows see what is before their block alone: nobody reads the last block's keys."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        state, made = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]), []
        for a, b, c in split(q, k, v):
            made.append(a @ state)
            state = (0.9 * state + b.mT @ c).tanh()
        return torch.cat(made, 2)


class FirstHeads(Heads):
    """There is no state in front of the first block, whose queries nobody reads."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        state, made = None, []
        for a, b, c in sliced(q, k, v):
            made.append(c if state is None else c + a @ state)
            state = b.mT @ c if state is None else (0.9 * state + b.mT @ c).tanh()
        return torch.cat(made, 2)


class LocalHeads(Heads):
    """Attention inside of blocks: nothing goes from one to the next."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([(a @ b.mT).tril() @ c for a, b, c in sliced(q, k, v)], 2)


class WindowHeads(Heads):
    """Blocks see the one before, too."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        made, starts = [], range(0, q.shape[2], BLOCK)
        for start in starts:
            seen = slice(max(start - BLOCK, 0), start + BLOCK)
            made.append((q[:, :, start : start + BLOCK] @ k[:, :, seen].mT).sigmoid() @ v[:, :, seen])
        return torch.cat(made, 2)


def model(heads: type[Heads]) -> Decoder:
    torch.manual_seed(0)
    return type("Cut", (Decoder,), {"attention": heads})().double()  # type: ignore[no-any-return]


def compared(heads: type[Heads], length: int, also: tuple[int, ...] = (1, 3, 4, 64)) -> Report:
    ids = torch.randint(0, VOCABULARY, (2, length))
    return compare(model(heads), {"ids": ids, "labels": ids}, chunk_size=8, also=also)


def loops_of(report: Report) -> int:
    return sum(isinstance(node.target, Recurrence) for node in report.facts[0].joint.nodes)


@pytest.mark.parametrize("length", only([24, 26], [12, 13, 15, 20, 24, 26, 27, 40]))
@pytest.mark.parametrize("heads", [CutHeads, SplitHeads, BehindHeads, FirstHeads, LocalHeads])
def test_loops_over_blocks_stream(heads: type[Heads], length: int) -> None:
    """Each is one operator per half, whatever is left behind the last block."""
    assert loops_of(compared(heads, length)) == 2 * LAYERS


@pytest.mark.parametrize("heads", only([CutHeads, LocalHeads], [CutHeads, SplitHeads, LocalHeads]))
def test_for_any_number_of_blocks(heads: type[Heads]) -> None:
    few, many = (compared(heads, BLOCK * count + 3, also=()).facts[0] for count in (6, MOST_PARTS + 6))
    assert len(few.joint.nodes) == len(many.joint.nodes)


def test_blocks_that_overlap_stay_as_they_are() -> None:
    """A step that reads two blocks takes rows from elsewhere: in a loop of its own they would be given to it as a whole."""
    assert loops_of(compared(WindowHeads, 24)) == 0


class Odd(nn.Module):
    """A table of tokens, something of blocks, and a loss."""

    def __init__(self, made: Callable[[Odd, Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.embed, self.head, self.made = nn.Embedding(VOCABULARY, 4), nn.Linear(4, VOCABULARY), made

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x, beside = self.made(self, self.embed(ids))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()) + beside


def without_rows(model: Odd, x: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks of no rows are no blocks."""
    empty = x.split([0, 0, 0, x.shape[1]], 1)[:3]
    return x * (1 + torch.cat(empty, 1).sum()), x.new_zeros(())


def with_losses(model: Odd, x: Tensor) -> tuple[Tensor, Tensor]:
    """What each block adds to the loss reaches no row that is joined."""
    made, beside = [], x.new_zeros(())
    for part in x.split(3, 1):
        made.append(part.sin())
        beside = beside + model.head(part).square().mean()
    return x + torch.cat(made, 1), beside


@pytest.mark.parametrize(("made", "streams"), [(without_rows, False), (with_losses, True)])
def test_blocks_that_are_odd(made: Callable[[Odd, Tensor], tuple[Tensor, Tensor]], streams: bool) -> None:
    """Each time alike: ids and labels are both cut into blocks, and one of the two is the sequence."""
    ids, counts = torch.randint(0, VOCABULARY, (2, 15)), set[int]()
    for _ in range(3):
        report = compare(Odd(made).double(), {"ids": ids, "labels": ids}, chunk_size=4, streams=streams)
        counts.add(len(report.facts[0].joint.nodes))
    assert len(counts) == 1


# -- written in other words, and back


def rewritten(function: Callable[[Tensor], Tensor], x: Tensor, goes_back: bool) -> list[str]:
    """The graph's operators; it gives the same to the bit."""
    before = make_fx(function, tracing_mode="fake")(x)
    graph = fx.Graph()
    graph.output(graph.graph_copy(before.graph, {}))
    for node, copy in zip(before.graph.nodes, graph.nodes, strict=True):
        copy.meta = dict(node.meta)
    writer = GraphWriter(graph)
    blocks = cut_blocks(joint_graph(graph, 1, 1), writer)
    if goes_back:
        put_back(blocks, graph, writer)
    graph.eliminate_dead_code()
    same(fx.GraphModule(before, graph)(x.clone()), before(x.clone()), bits=True)
    return [call_text(node) for node in graph.nodes if node.op == "call_function"]


def in_blocks(x: Tensor) -> Tensor:
    return torch.cat([part.sin() for part in (x[:, :2], x[:, 2:4], x[:, 4:6], x[:, 6:])], 1)


def gradient(x: Tensor) -> Tensor:
    shape = list(x.shape)
    parts = [aten.slice_backward(x[:, 2 * i : 2 * i + 2].sin(), shape, 1, 2 * i, 2 * i + 2, 1) for i in range(3)]
    rest = aten.slice_backward(x[:, 6:].cos(), shape, 1, 6, 7, 1)
    return torch.cat([part[:, :2] for part in (x, x, x)], 1)[:, :1] + (parts[0] + (parts[1] + parts[2])) + rest


def test_blocks_as_rows() -> None:
    assert rewritten(in_blocks, special(2, 7), goes_back=False) == [
        "slice(x_1, 1, 0, 6)",
        "view(slice_tensor, [2, 3, 2])",
        "select(view_default_1, 1, 0)",
        "select(view_default_1, 1, 1)",
        "select(view_default_1, 1, 2)",
        "slice(x_1, 1, 6, 9223372036854775807)",
        "sin(select_int)",
        "sin(select_int_1)",
        "sin(select_int_2)",
        "sin(slice_4)",
        "stack([sin, sin_1, sin_2], 1)",
        "view(stack_default, [2, 6])",
        "cat([view_default, sin_3], 1)",
    ]


@pytest.mark.parametrize("function", [in_blocks, gradient])
def test_what_no_loop_takes_is_put_back(function: Callable[[Tensor], Tensor]) -> None:
    found = rewritten(function, special(2, 7), goes_back=True)
    assert not any(line.startswith(("view", "stack", "select")) for line in found), found
