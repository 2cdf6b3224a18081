"""Host work: code that is written for graphs and loops; the host does not wait for the device, but once per mask of data.

No test measures time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from streamfx.runtime.chunks import Chunks, blocks_of, in_turn
from streamfx.runtime.outer import OuterGraph
from streamfx.runtime.written import Call, function_of
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


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("length", "step", "inner"), [(37, 5, 1), (40, 5, 2), (3, 8, 1), (1, 1, 3), (0, 4, 1), (201, 3, 2)])
def test_rows_in_turn_are_those_of_each_chunk(length: int, step: int, inner: int, reverse: bool) -> None:
    """As they would lie if each were taken by itself: masks are known by that."""
    tensor, chunks = torch.randn(2, 3, length * inner + 4, 2)[:, 1:, 4:], Chunks(length, step, reverse)
    found = list(in_turn(tensor, 2, inner, blocks_of(chunks)))
    alone = [tensor.narrow(2, start * inner, (stop - start) * inner) for start, stop in chunks]
    listed = list(in_turn(tensor, 2, inner, blocks_of(list(chunks))))
    for rows in (found, listed):
        assert [(own.data_ptr(), own.shape, own.stride()) for own in rows] == [
            (own.data_ptr(), own.shape, own.stride()) for own in alone
        ]
    assert list(chunks) == [chunks[i] for i in range(len(chunks))]
    assert chunks.lengths == len({stop - start for start, stop in chunks})


def test_a_written_function_keeps_nothing() -> None:
    """It empties what it is given, drops values after their last use, and names the operator that failed."""
    graph = fx.Graph()
    arguments, unused, error = (graph.placeholder(name) for name in ("arguments", "unused", "error"))
    alive: list[Any] = []

    def doubled(value: Tensor, named: tuple[Any, ...]) -> Tensor:
        made = value * 2
        alive.append(ref(made))
        return made

    def looked(value: Tensor, **others: Any) -> Tensor:
        assert alive[0]() is None and others == {"from": [1, math.inf], "dim": None}
        return value

    first = graph.call_function(doubled, (arguments, (slice(1, None), torch.float32)))
    second = graph.call_function(torch.neg, (first,))
    third = graph.call_function(looked, (second,), {"from": [1, math.inf], "dim": None})
    targets: tuple[Any, ...] = doubled, torch.neg, looked
    nodes = (first, second, third)
    calls = [Call(run, node.args, dict(node.kwargs), node, (node,)) for run, node in zip(targets, nodes, strict=True)]
    run = function_of("outer", (arguments, unused, error), calls, (third, error, -math.inf), boxed=True)
    given: list[Any] = [torch.ones(2), torch.ones(1), 7]
    made = run(given)
    assert not given and torch.equal(made[0], torch.full((2,), -2.0)) and made[1:] == (7, -math.inf)
    second.meta["stack_trace"] = 'File "users.py", line 3, in forward\n    x = wrong(y)'
    with pytest.raises(TypeError) as found:
        run(["no tensor", None, None])
    assert "users.py:3" in "".join(getattr(found.value, "__notes__", ["users.py:3"]))  # Python 3.10 has no notes
