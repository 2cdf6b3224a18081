"""Written out for all scores, a score function gives what it gives score by score, and its gradient the same sums."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from streamfx.ir.writer import GraphWriter
from streamfx.passes.rewrite.attention.score_mod import NotElementwiseError, ScoreValue, written_out

aten = torch.ops.aten
Function = Callable[..., Tensor]  # of a score, four indices, a vector of heads [3], a table [3 9] and documents [2 5]

FUNCTIONS: dict[str, Function] = {
    "same": lambda score, b, h, m, n, heads, table, documents: score,
    "slopes": lambda score, b, h, m, n, heads, table, documents: score + heads[h] * (n - m),
    "softcap": lambda score, b, h, m, n, heads, table, documents: torch.tanh(score / 3) * 3,
    "table": lambda score, b, h, m, n, heads, table, documents: score * table[h, (m - n).clamp(0, 8)],
    "table in steps": lambda score, b, h, m, n, heads, table, documents: score + table[h][(m - n).clamp(0, 8)],
    "documents": lambda score, b, h, m, n, heads, table, documents: torch.where(
        documents[b, m] == documents[b, n], score, heads[0]
    ),
    "mask": lambda score, b, h, m, n, heads, table, documents: (m >= n) & ((m - n < 3) | (h == 1)),
    "constant": lambda score, b, h, m, n, heads, table, documents: score.new_ones((), dtype=torch.bool),
    "rows": lambda score, b, h, m, n, heads, table, documents: score.detach() * torch.sigmoid(m.to(score.dtype)),
}
SIZES = (2, 3, 5, 4)


def one_by_one(function: Function, scores: Tensor, *captured: Tensor) -> Tensor:
    b, h, m, n = (torch.arange(size) for size in scores.shape)
    for position in (4, 3, 2, 1):  # of the scores, and of one of the indices
        own = tuple(0 if i in (0, position) else None for i in range(5 + len(captured)))
        function = torch.vmap(function, in_dims=own, out_dims=0)
    with TransformGetItemToIndex():
        return function(scores, b, h, m, n, *captured)


def traced(function: Function, scores: Tensor, *captured: Tensor) -> fx.GraphModule:
    """The graph of the function of one score, as `flex_attention` is given it."""
    indices = torch.zeros(4, dtype=torch.int64).unbind()
    with TransformGetItemToIndex():
        return make_fx(function)(scores[0, 0, 0, 0], *indices, *captured)


def everywhere(function: Function, scores: Tensor, *captured: Tensor) -> Tensor:
    """The function written out for all scores, and run."""
    inner, graph = traced(function, scores, *captured), fx.Graph()
    mode = FakeTensorMode()
    places = [graph.placeholder(f"x{i}") for i in range(1 + len(captured))]
    for place, tensor in zip(places, (scores, *captured), strict=True):
        place.meta["val"] = mode.from_tensor(tensor)
    output = graph.output(None)
    writer = GraphWriter(graph).before(output)
    indices = []
    for dim, size in enumerate(scores.shape):
        numbers = writer.call(aten.arange.default, size)
        indices.append(ScoreValue(writer.call(aten.reshape.default, numbers, [size if i == dim else 1 for i in range(4)])))
    made = written_out(inner, [ScoreValue(places[0]), *indices, *places[1:]], writer)
    output.args = (made.node if isinstance(made, ScoreValue) else made,)
    result: Tensor = fx.GraphModule(torch.nn.Module(), graph)(scores, *captured)
    return result.expand(scores.shape)


@pytest.mark.parametrize("name", FUNCTIONS)
@settings(max_examples=4, deadline=None, database=None, derandomize=True)
@given(st.integers(0, 9))
def test_law(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    scores, heads, table = (torch.randn(*shape, dtype=torch.float64) for shape in (SIZES, (3,), (3, 9)))
    captured = (heads, table, torch.randint(0, 2, (2, 5)))
    torch.testing.assert_close(
        everywhere(FUNCTIONS[name], scores, *captured), one_by_one(FUNCTIONS[name], scores, *captured).expand(SIZES)
    )


def test_what_has_no_form() -> None:
    scores, heads = torch.randn(SIZES), torch.randn(3, 4)
    with pytest.raises(NotElementwiseError, match="sum"):
        everywhere(lambda score, b, h, m, n, heads: score + heads[h].sum(), scores, heads)
