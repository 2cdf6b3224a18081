"""Position-dependent values that an operator computes over all keys before a mask hides some."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from streamfx.ir.facts import Facts
from tests.support.tracing import compare_function

T = 13
Made = Callable[[Tensor, Tensor], Tensor]
MADE: dict[str, Made] = {  # of a trained number and the distances of all rows and keys
    "softmax": lambda c, d: (-c * d.abs()).softmax(-1),
    "softmax over queries": lambda c, d: (-c * d.abs()).softmax(-2),
    "turned": lambda c, d: (-c * d * d).transpose(0, 1).softmax(-1),
    "running sum": lambda c, d: torch.exp(-c * d.abs()).cumsum(-1),
    "running product": lambda c, d: (1 + c * d.sin()).cumprod(-1),
    "sorted": lambda c, d: (c * (d * d).sin()).sort(-1)[0],
    "share of many": lambda c, d: ((e := torch.exp(-c * d.abs()).expand(700, T, T)) / e.sum(-1, keepdim=True))[::123].sum(0),
    "product": lambda c, d: torch.exp(-c * d.abs()) @ d.cos(),
    "softmax, and what follows": lambda c, d: ((-c * d.abs()).softmax(-1) + d).sin() * c,
}


def compared(made: Made) -> Facts:
    x = torch.randn(2, T, 4, dtype=torch.float64, requires_grad=True)
    decay = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)

    def function(x: Tensor, decay: Tensor) -> Tensor:
        at = torch.arange(x.shape[1], dtype=torch.float64)
        return (made(decay, at[:, None] - at).tril() @ x).square().sum()

    return compare_function(function, (x, decay), (4,), tolerance=1e-12)


@pytest.mark.parametrize("name", MADE)
def test_operators_over_keys_read_all_keys(name: str) -> None:
    compared(MADE[name])


def test_elementwise_values_cover_the_keys_of_their_consumer() -> None:
    """A decay by distance is not computed for hidden keys."""
    facts = compared(lambda c, d: torch.exp(-c * d))
    assert "causal" in facts.key_spans.span_kinds.values()
    assert {node.name for node in facts.key_spans.recomputed_per_consumer} >= {"exp", "tril"}
