"""A compiled decoder and its eager copy, batches for both, and a comparison of their gradients."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.support import decoders, layouts
from tests.support.exactness import TOLERANCE, Recorder, assert_small, gradient_errors, recorder

LENGTH = 13


def batch(rows: int = 2, length: int = LENGTH, seed: int = 0) -> dict[str, Tensor]:
    ids = layouts.tokens(decoders.VOCABULARY, rows, length, seed)
    return {"ids": ids, "labels": ids}


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def compiled(model: nn.Module, **options: Any) -> tuple[Callable[..., Any], Recorder]:
    backend = recorder(**{"chunk_size": 5, "loss_chunk_size": 5, **options})
    return torch.compile(model, backend=backend), backend


def twins(make: Callable[[], nn.Module] = decoders.Plain) -> tuple[nn.Module, nn.Module]:
    model = decoders.made(make)
    return model, copy.deepcopy(model)


def same_gradients(own: nn.Module, eager: nn.Module, what: str = "", tolerance: float = TOLERANCE) -> None:
    assert_small(gradient_errors(gradients(own), gradients(eager)), tolerance, what)


def same_step(function: Callable[..., Any], own: nn.Module, eager: nn.Module, inputs: dict[str, Tensor]) -> None:
    """One step of both, from no gradients: of `own` by its compiled `function`."""
    own.zero_grad()
    eager.zero_grad()
    function(**inputs).backward()
    eager(**inputs).backward()
    same_gradients(own, eager, str({name: tuple(item.shape) for name, item in inputs.items()}))
