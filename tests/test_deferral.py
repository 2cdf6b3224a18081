"""Which outputs are deferred, what they are rebuilt from, and that they are exact under every head and for every length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from streamfx.backend import Compilation, streambp
from streamfx.errors import NotStreamed
from streamfx.lazy import defer_outputs, steps
from streamfx.lazy.deferred import DeferredTensor
from streamfx.options import resolved
from tests.support.deferred import OPTIONS, assert_same, gradients
from tests.support.heads import HEADS, MIXED, decoder, some_ids
from tests.support.spread import only


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


def recipe_of(head: Callable[..., Any]) -> Any:
    deferral = defer_outputs(dynamo_graph(decoder(head), some_ids()))
    return None if deferral is None else deferral.plan.recipes[0]


ROWS: dict[str, tuple[int | None, ...] | None] = {
    "softcap": (0, 1, None),
    "mask": (0, 1, None),
    "log-probabilities": (0, 1, None),
    "einsum": None,
    "less the mean over time": (0, None, None),
    "a norm behind a mean over time": (0, None, None),
    "less the mean of all": None,
    "a scale made of rows": None,
    "all rows added": None,
}


@pytest.mark.parametrize("head", ROWS)
def test_rows_are_known_where_functions_work_row_by_row(head: str) -> None:
    rows = recipe_of(HEADS[head][0]).rows
    assert (None if rows is None else rows.dims) == ROWS[head]


def test_a_head_is_found_however_its_weight_is_transposed() -> None:
    """Dynamo writes an attribute as one until torch 2.13, later as an operator."""
    aten = torch.ops.aten
    operators = [aten.numpy_T, aten.matrix_H, aten.mT, aten.mH, aten.adjoint, aten.t, aten.t.default, torch.t, torch.adjoint]
    written = [lambda w: w.T, lambda w: w.mT, lambda w: w.H, lambda w: w.mH, lambda w: w.t(), lambda w: w.adjoint()]
    with_dims = [lambda w: w.transpose(0, 1), lambda w: w.swapaxes(0, 1), lambda w: w.permute(1, 0), lambda w: w.movedim(0, 1)]
    for turn in (*operators, *written, *with_dims):
        torch._dynamo.reset()
        rows = recipe_of(lambda model, x, ids, turn=turn: x @ turn(model.weight)).rows
        assert rows is not None and rows.dims == (0, 1, None), turn


def test_an_error_in_the_search_leaves_outputs_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(module: fx.GraphModule) -> None:
        raise KeyError("lost")

    monkeypatch.setattr("streamfx.backend.defer_outputs", broken)
    module = dynamo_graph(decoder(), some_ids())
    assert Compilation(module, resolved()).deferral() is None
    with pytest.raises(NotStreamed, match="KeyError: 'lost'"):
        Compilation(module, resolved({"strict": True})).deferral()


# -- they are exact

ALONE = ["linear", "weights made of rows", "all rows added", *MIXED]


@pytest.mark.parametrize("name", only([*ALONE[:2], "less the mean over time", "a norm behind a mean over time"], ALONE))
def test_rows_that_are_read_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of logits so large that they are never made whole, where the norm in front of the head reads other rows."""
    monkeypatch.setattr(steps, "LEAST", 1)
    model = decoder(HEADS[name][0])
    for ids in (some_ids(60)[:1], some_ids(60)):
        compiled = torch.compile(model, backend="streambp", options=OPTIONS, dynamic=False)
        for read in (lambda logits: logits[:, -1], lambda logits: logits[:, 3:9] * 1, lambda logits: logits[-1, 5].argmax(-1)):
            with torch.no_grad():
                torch.testing.assert_close(read(compiled(ids)) * 1, read(model(ids)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", only(["less the largest", "less the third", "capped beside the largest", "detached"], HEADS))
def test_heads_are_exact(name: str) -> None:
    """Outputs, and gradients of the loss alone and of all outputs, equal eager's; as many as expected are deferred."""
    head, number = HEADS[name]
    model, ids = decoder(head), some_ids()
    compiled = torch.compile(model, backend="streambp", options=OPTIONS)
    results = []
    for function in (compiled, model):
        outputs = function(ids, ids)
        if function is compiled:
            assert sum(isinstance(output, DeferredTensor) for output in outputs) == number
            assert outputs[-1] is outputs[1] or name != "twice the same"
        outputs[0].backward(retain_graph=True)
        of_loss = gradients(model)
        weighted = [(o * torch.arange(o.numel()).view(o.shape)).sum() for o in outputs[1:] if o.requires_grad]
        (outputs[0] + sum(weighted)).backward()
        results.append((outputs, of_loss, gradients(model)))
    assert_same(results[0], results[1])


def test_lengths_that_change() -> None:
    model, compilations = decoder(), list[fx.GraphModule]()

    def counted(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        compilations.append(module)
        return streambp(module, inputs, options=OPTIONS)

    compiled = torch.compile(model, backend=counted)
    for length in (11, 7, 19, 23):
        ids, results = some_ids(length), []
        for function in (compiled, model):
            loss, logits = function(ids, ids)
            (loss + F.cross_entropy(logits.transpose(1, 2), ids.flip(1))).backward()
            results.append((loss, logits, gradients(model)))
        assert_same(results[0], results[1])
        assert isinstance(results[0][1], DeferredTensor)
    assert len(compilations) == 2
