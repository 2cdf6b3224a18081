"""A gradient that is a multiple of a number, or of a number per sequence, is found along with the loss; any other is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers")

from tests.support.exactness import assert_small, check_streamed, errors, outcome, recorder
from tests.support.objectives import OBJECTIVES, Step, batch_of
from tests.support.objectives.models import VOCABULARY

TOLERANCE = 1e-12
FROZEN = ("lm_head", "embed_tokens", "model.norm")  # as adapters leave them


class HeadProducts(TorchDispatchMode):
    """FLOPs of products with the vocabulary, in products of all rows."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            one, other = args[-2:]
            if VOCABULARY in (*one.shape, *other.shape):
                self.flops += 2 * one.shape[0] * one.shape[1] * other.shape[1]
        return result


def head_products(step: Any, batch: dict[str, Tensor]) -> int:
    with HeadProducts() as counted:
        step(**batch).backward()
    return counted.flops


def frozen(step: Step) -> Step:
    for name, parameter in step.models.policy.named_parameters():
        parameter.requires_grad_(not any(part in name for part in FROZEN))
    return step


@pytest.mark.parametrize("name", OBJECTIVES)
def test_objectives_with_a_frozen_head(name: str) -> None:
    step, batch = frozen(Step(OBJECTIVES[name])), batch_of()
    truth = outcome(step, step, batch)
    eager = head_products(step, batch)
    backend = recorder(chunk_size=5, loss_chunk_size=5)
    compiled = torch.compile(step, backend=backend)
    assert_small(errors(outcome(compiled, step, batch), truth), TOLERANCE, name)
    check_streamed(backend.facts, True, {"causal"})
    own = head_products(compiled, batch)
    print(name, backend.facts[-1].stages.stages[-1].gradient_in_forward, own / max(eager, 1))
