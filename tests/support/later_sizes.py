"""One compiled model at one batch and length after the other, against eager."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from tests.support.layouts import tokens


def compare_sizes(make: Callable[[], nn.Module], backend: Any, sizes: Iterable[tuple[int, int]], **options: Any) -> None:
    """Assert that gradients equal eager's; `make` makes a model with the same weights each time, sizes are (batch, length)."""
    torch._dynamo.reset()
    eager, own = make(), make()
    model = torch.compile(own, backend=backend, **options)
    for batch, length in sizes:
        ids = tokens(23, batch, length, length)
        gradients = []
        for call, kind in ((eager, eager), (model, own)):
            kind.zero_grad()
            call(ids, ids).backward()
            gradients.append({name: each.grad for name, each in kind.named_parameters() if each.grad is not None})
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-12, atol=1e-14)
