"""The host does not wait for the device in a step, but once where a mask depends on data. (No test measures time.)"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamfx.runtime.outer import OuterGraph
from streamfx.torch_private import TorchDispatchMode
from tests.support.small import Causal, Padded, tokens

WAITS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "_unique2", "unique_dim", "masked_select", "repeat_interleave"}


class Waits(TorchDispatchMode):
    """Counts operators whose result the host has to know."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        self.found.update([name] if name in WAITS else [])
        return function(*args, **(kwargs or {}))


@contextmanager
def waits() -> Iterator[Counter[str]]:
    """What the host waits for inside of outer graphs: Dynamo compiles nothing for a caller with a mode of its own."""
    mode, hosted, run = Waits(), set[int](), OuterGraph.run
    copied, listed = Tensor.cpu, Tensor.tolist

    def watched(self: OuterGraph, arguments: list[Any]) -> Any:
        with mode:
            return run(self, arguments)

    def cpu(self: Tensor) -> Tensor:
        mode.found["cpu"] += 1
        made = copied(self).clone()
        hosted.add(made.untyped_storage().data_ptr())
        return made

    def tolist(self: Tensor) -> Any:
        mode.found["tolist"] += self.untyped_storage().data_ptr() not in hosted
        return listed(self)

    with (
        mock.patch.object(OuterGraph, "run", watched),
        mock.patch.object(Tensor, "cpu", cpu),
        mock.patch.object(Tensor, "tolist", tolist),
    ):
        yield mode.found


def test_a_causal_step_does_not_wait() -> None:
    model, ids = Causal(), tokens(2, 37)
    call = torch.compile(model, backend="streambp", options={"chunk_size": 4})
    for _ in range(2):
        with waits() as found:
            call(ids, ids).backward()
        assert +found == Counter()


class Packed(nn.Module):
    """Layers in which a token sees the earlier ones of its own document."""

    def __init__(self, layers: int = 3, width: int = 8) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(width, width) for _ in range(layers))

    def forward(self, x: Tensor, document: Tensor) -> Tensor:
        row = torch.arange(x.shape[1])
        seen = (document[:, :, None] == document[:, None]) & (row <= row[:, None])
        for weight in self.weights:
            heads = (x @ weight)[:, None]
            x = x + F.scaled_dot_product_attention(heads, heads, heads, attn_mask=seen[:, None])[:, 0]
        return x


def padding(batch: int, length: int) -> Tensor:
    return torch.arange(length).expand(batch, -1) < torch.arange(length - batch, length)[:, None]


def documents(batch: int, length: int) -> Tensor:
    return torch.arange(length).expand(batch, -1) // 11


@pytest.mark.parametrize(
    ("model", "given"), [(Padded(layers=3, width=8), padding), (Packed(), documents)], ids=["padding", "packed documents"]
)
def test_a_step_with_a_mask_of_data_waits_once(model: nn.Module, given: Any) -> None:
    """Not once per chunk, nor per layer, nor again in the backward half."""
    call = torch.compile(model, backend="streambp", options={"chunk_size": 8})
    x, data = torch.randn(2, 61, 8), given(2, 61)
    for _ in range(2):
        with waits() as found:
            call(x, data).square().sum().backward()
        assert +found == Counter(cpu=1)
