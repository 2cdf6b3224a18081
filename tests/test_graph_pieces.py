"""Parts of a model, each compiled alone: layers one by one, an MLP, a norm, the backbone, the head with its loss."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamfx.ir.facts import known
from tests.support import hf
from tests.support.exactness import TOLERANCE, Recorder, assert_small, check_streamed, errors, outcome, recorder
from tests.support.spread import only

pytestmark = pytest.mark.compiled

LENGTH = 19
Install = Callable[[Any, Any], Any]


def check(model: nn.Module, inputs: Any, install: Install, graphs: int = 1) -> Recorder:
    """Compile parts of a copy, compare with the model, and ask that all of them stream along the rows."""
    model = model.double()
    truth = outcome(eager := copy.deepcopy(model), eager, inputs)
    own, backend = copy.deepcopy(model), recorder(chunk_size=7, loss_chunk_size=7)
    install(own, backend)
    assert_small(errors(outcome(own, own, inputs), truth), TOLERANCE, "compiled in parts")
    assert len(backend.compilations) == graphs
    check_streamed(backend.facts, True, None)
    assert {known(facts.axes.sequence).length for facts in backend.facts} == {LENGTH}
    return backend


def tokens() -> dict[str, Tensor]:
    pytest.importorskip("transformers")
    ids = torch.randint(3, 23, (2, LENGTH))
    return {"input_ids": ids, "labels": ids}


def rows(*sizes: int) -> Tensor:
    return torch.randn(sizes, dtype=torch.float64, requires_grad=True)


PARTS: dict[str, Callable[[Any], list[Any]]] = {
    "layers": lambda model: [*model.layers],
    "MLPs": lambda model: [layer.mlp for layer in model.layers],
    "attentions": lambda model: [layer.self_attn for layer in model.layers],
    "norms": lambda model: [layer.input_layernorm for layer in model.layers],
    "backbone": lambda model: [model],
}
ALL_PARTS = [(name, part) for name in ("llama", "gemma2", "qwen3") for part in PARTS]


@pytest.mark.parametrize(("name", "part"), only([("llama", part) for part in ("layers", "norms")], ALL_PARTS))
def test_parts_of_models(name: str, part: str) -> None:
    check(getattr(hf, name)(), tokens(), lambda own, backend: [one.compile(backend=backend) for one in PARTS[part](own.model)])


class Head(nn.Module):
    """An embedding outside of the compiled part, the head and the loss inside."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(23, 16), nn.Linear(16, 23)
        self.loss: Callable[..., Tensor] = lambda x, labels: F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.embed(input_ids), labels)


def test_head_and_loss() -> None:
    check(Head(), tokens(), lambda own, backend: setattr(own, "loss", torch.compile(own.loss, backend=backend)))
