"""A score function, evaluated for all scores at once, equals its values score by score."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from streamfx.ir.writer import GraphWriter
from streamfx.passes.rewrite.attention.score_mod import NotElementwiseError, ScoreValue, vectorize_graph

aten = torch.ops.aten
SIZES = (2, 3, 5, 4)
FUNCTIONS: dict[str, Callable[..., Tensor]] = {
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


def one_by_one(function: Callable[..., Tensor], scores: Tensor, *captured: Tensor) -> Tensor:
    for position in (4, 3, 2, 1):  # of the scores, and of one of the indices
        own = tuple(0 if i in (0, position) else None for i in range(5 + len(captured)))
        function = torch.vmap(function, in_dims=own, out_dims=0)
    with TransformGetItemToIndex():
        return function(scores, *map(torch.arange, SIZES), *captured).expand(SIZES)


def everywhere(function: Callable[..., Tensor], scores: Tensor, *captured: Tensor) -> Tensor:
    """Vectorize the graph of the function of one score, which `flex_attention` gets, and run it."""
    with TransformGetItemToIndex():
        inner = make_fx(function)(scores[0, 0, 0, 0], *torch.zeros(4, dtype=torch.int64).unbind(), *captured)
    graph, mode = fx.Graph(), FakeTensorMode()
    places = [graph.placeholder(f"x{i}") for i in range(1 + len(captured))]
    for place, tensor in zip(places, (scores, *captured), strict=True):
        place.meta["val"] = mode.from_tensor(tensor)
    output = graph.output(None)
    writer, indices = GraphWriter(graph).before(output), []
    for dim, size in enumerate(SIZES):
        numbers = writer.call(aten.arange.default, size)
        indices.append(ScoreValue(writer.call(aten.reshape.default, numbers, [size if i == dim else 1 for i in range(4)])))
    made = vectorize_graph(inner, [ScoreValue(places[0]), *indices, *places[1:]], writer)
    output.args = (made.node if isinstance(made, ScoreValue) else made,)
    return fx.GraphModule(torch.nn.Module(), graph)(scores, *captured).expand(SIZES)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_vectorized_functions_have_the_same_values(name: str) -> None:
    scores, heads, table = (torch.randn(*shape, dtype=torch.float64) for shape in (SIZES, (3,), (3, 9)))
    given = scores, heads, table, torch.randint(0, 2, (2, 5))
    torch.testing.assert_close(everywhere(FUNCTIONS[name], *given), one_by_one(FUNCTIONS[name], *given))


def test_a_sum_is_not_elementwise() -> None:
    with pytest.raises(NotElementwiseError, match="sum"):
        everywhere(lambda score, b, h, m, n, heads: score + heads[h].sum(), torch.randn(SIZES), torch.randn(3, 4))
