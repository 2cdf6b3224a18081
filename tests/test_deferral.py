"""The search for outputs to defer: what is rebuilt from what, which rows are known, and what is left dense."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from streamfx.errors import NotStreamedError
from streamfx.frontend.backend import Compilation
from streamfx.lazy import defer_outputs
from streamfx.options import resolved
from tests.support.heads import HEADS, Decoder, decoder, some_ids


def dynamo_graph(model: nn.Module, *arguments: Any) -> fx.GraphModule:
    graphs: list[fx.GraphModule] = []

    def backend(module: fx.GraphModule, inputs: list[Any]) -> fx.GraphModule:
        graphs.append(module)
        return module

    torch.compile(model, backend=backend)(*arguments)
    return graphs[0]


PLAN = """
deferred made [2, 11, 40] torch.float64 on cpu, from weight, x_1
  layer_norm = layer_norm(x_1, (8,))
  linear_2 = linear(layer_norm, weight)
  truediv = truediv(linear_2, 3.0)
  tanh = tanh(truediv)
  made = mul(tanh, 3.0)
"""


def test_the_plan_as_text() -> None:
    module = dynamo_graph(decoder(), some_ids(), some_ids())
    before = module.print_readable(print_output=False)
    deferral = defer_outputs(module)
    assert deferral is not None
    names = [str(node) for node in deferral.module.graph.output_node().args[0]]  # type: ignore[union-attr]
    assert names == ["cross_entropy", "x_1"]
    assert str(deferral.plan) == PLAN.strip()
    assert module.print_readable(print_output=False) == before


@pytest.mark.parametrize(("head", "given"), [("linear", "weight, x_1"), ("low rank", "up, matmul")])
def test_a_value_is_rebuilt_from_the_fewest_bytes(head: str, given: str) -> None:
    deferral = defer_outputs(dynamo_graph(decoder(HEADS[head][0]), some_ids()))
    assert deferral is not None
    assert str(deferral.plan.recipes[0]).endswith(f"from {given}")


@pytest.mark.parametrize(
    ("head", "dims"),
    [
        ("linear", (0, 1, None)),
        ("softcap", (0, 1, None)),
        ("mask", (0, 1, None)),
        ("log-probabilities", (0, 1, None)),
        ("einsum", None),
        ("less the mean over time", (0, None, None)),
        ("a norm behind a mean over time", (0, None, None)),
        ("less the mean of all", None),
        ("less the mean over no dimension, which is all", None),
        ("less the mean over sequences and time", None),
        ("in proportion to all", None),
        ("a scale made of rows", None),
        ("weights made of rows", None),
        ("all rows added", None),
    ],
)
def test_rows_are_known_where_functions_work_row_by_row(head: str, dims: tuple[int | None, ...] | None) -> None:
    deferral = defer_outputs(dynamo_graph(decoder(HEADS[head][0]), some_ids()))
    assert deferral is not None
    rows = deferral.plan.recipes[0].rows
    assert (None if rows is None else rows.dims) == dims


TRANSPOSED: dict[str, Callable[[Tensor], Tensor]] = {
    "T": lambda w: w.T,
    "mT": lambda w: w.mT,
    "H": lambda w: w.H,
    "mH": lambda w: w.mH,
    "t": lambda w: w.t(),
    "torch.t": torch.t,
    "adjoint": lambda w: w.adjoint(),
    "torch.adjoint": torch.adjoint,
    "transpose": lambda w: w.transpose(0, 1),
    "swapaxes": lambda w: w.swapaxes(0, 1),
    "permute": lambda w: w.permute(1, 0),
    "movedim": lambda w: w.movedim(0, 1),
    "moveaxis": lambda w: w.moveaxis(0, 1),
    **{f"aten.{name}": getattr(torch.ops.aten, name) for name in ("numpy_T", "matrix_H", "mT", "mH", "adjoint", "t")},
    **{f"{name}.default": getattr(torch.ops.aten, name).default for name in ("numpy_T", "matrix_H", "mT", "mH", "adjoint", "t")},
}


@pytest.mark.parametrize("name", [*TRANSPOSED, "torch.linalg.matmul"])
def test_a_head_is_found_however_its_weight_is_transposed(name: str) -> None:
    """Dynamo writes an attribute as one until torch 2.13, later as an operator."""
    turn, product = TRANSPOSED.get(name, torch.t), torch.linalg.matmul if name == "torch.linalg.matmul" else torch.matmul
    deferral = defer_outputs(dynamo_graph(decoder(lambda model, x, ids: product(x, turn(model.weight))), some_ids()))
    assert deferral is not None
    rows = deferral.plan.recipes[0].rows
    assert rows is not None and rows.dims == (0, 1, None)


def test_small_outputs_stay_as_they_are() -> None:
    def head(model: Decoder, x: Tensor, ids: Tensor) -> Tensor:
        return F.linear(x, model.weight[:12])  # less than twice the width

    assert defer_outputs(dynamo_graph(decoder(head), some_ids())) is None


def test_an_error_in_the_search_leaves_outputs_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(module: fx.GraphModule) -> None:
        raise KeyError("lost")

    monkeypatch.setattr("streamfx.frontend.backend.defer_outputs", broken)
    module = dynamo_graph(decoder(), some_ids())
    assert Compilation(module, resolved()).deferral() is None
    with pytest.raises(NotStreamedError, match="KeyError: 'lost'"):
        Compilation(module, resolved({"strict": True})).deferral()
