"""Host work: code that is written for graphs and loops; the host does not wait for the device, but once per mask of data.

No test measures time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock
from weakref import ref

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from streamfx.ir.program import START, STOP
from streamfx.ir.sizes import Real, Truth
from streamfx.runtime import runtime_sizes
from streamfx.runtime.chunks import Chunks, blocks_of, in_turn
from streamfx.runtime.compiled_segments import Segment
from streamfx.runtime.expanded_code import CodeCall, function_of
from streamfx.runtime.loop_codegen import LoopWriter
from streamfx.runtime.outer import OuterGraph
from streamfx.torch_private import TorchDispatchMode
from tests.support.small import Causal, Padded, tokens
from tests.support.stretches import interpreted

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


ROWS, OTHER = (sympy.Symbol(name, integer=True, positive=True) for name in ("s0", "s1"))


def drawn_size(random: Random) -> Any:
    """A size that follows from what a chunk's rows are, or see, in an axis that may be the sequence or another one."""
    lengths = (ROWS, OTHER, ROWS - 1, OTHER + 2, 2 * OTHER)
    whole: tuple[Any, ...] = random.choice(((0, ROWS), (random.choice((-1, 0, 2)), random.choice(lengths))))
    kind = random.choice(
        (
            runtime_sizes.member_count,
            runtime_sizes.member_start,
            runtime_sizes.span_count,
            runtime_sizes.span_start,
            runtime_sizes.shifted_count,
        )
    )
    if kind in (runtime_sizes.span_count, runtime_sizes.span_start):
        whole = (random.choice((-sympy.oo, -sympy.oo, -3, 0)), random.choice((sympy.oo, sympy.oo, -1, 0)), *whole)
    if kind is runtime_sizes.shifted_count:
        whole = (*whole, random.choice((-1, 0, 2, OTHER - 3)), random.choice(lengths))
    made = kind(START, STOP, ROWS, *whole)
    return random.choice((made, 2 * made, made * OTHER + 1, (made - 1) * (made + OTHER), -made, 3 - 2 * made + STOP - START))


@pytest.mark.parametrize("seed", range(30))
def test_sizes_are_written_as_they_are_computed(seed: int) -> None:
    """Whatever a size of a chunk is part of, and whatever else has been written."""
    random = Random(seed)
    wanted = [drawn_size(random) for _ in range(16)]
    writer = LoopWriter(SimpleNamespace(length=ROWS))  # type: ignore[arg-type]
    texts = [writer.size(size).text for size in wanted]
    lines = [*writer.once, "found = []", "for start, stop in bounds:"]
    lines += [f"    {line}" for line in (*writer.each, f"found.append([{', '.join(texts)}])")]
    length, step = random.choice(((13, 5), (12, 4), (3, 8), (1, 1))), random.choice((7, 20))
    bounds = list(Chunks(*length))
    space: dict[str, Any] = {**runtime_sizes.FUNCTIONS, "s0": length[0], "s1": step, "bounds": bounds}
    exec("\n".join(lines), space)
    env = {"s0": length[0], "s1": step}
    computed = [
        [runtime_sizes.compiled_size(size)({**env, "start": one, "stop": other}) for size in wanted] for one, other in bounds
    ]
    assert space["found"] == computed, lines


def test_numbers_that_follow_from_sizes_need_not_be_whole() -> None:
    n = sympy.Symbol("n", integer=True, positive=True)
    assert runtime_sizes.compiled_size(Real(n * sympy.Float(0.25)))({"n": 5}) == 1.25
    assert runtime_sizes.compiled_size(Truth(n > 3))({"n": 4}) is True


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
    calls = [CodeCall(run, node.args, dict(node.kwargs), node, (node,)) for run, node in zip(targets, nodes, strict=True)]
    run = function_of("outer", (arguments, unused, error), calls, (third, error, -math.inf), boxed=True)
    given: list[Any] = [torch.ones(2), torch.ones(1), 7]
    made = run(given)
    assert not given and torch.equal(made[0], torch.full((2,), -2.0)) and made[1:] == (7, -math.inf)
    second.meta["stack_trace"] = 'File "users.py", line 3, in forward\n    x = wrong(y)'
    with pytest.raises(TypeError) as found:
        run(["no tensor", None, None])
    assert "users.py:3" in "".join(getattr(found.value, "__notes__", ["users.py:3"]))  # Python 3.10 has no notes


@pytest.mark.parametrize("several", [False, True])
def test_inputs_that_lie_otherwise_take_other_code(several: bool) -> None:
    """Code is found by how inputs lie, and reads them so."""
    segment, x = Segment(fx.symbolic_trace(lambda x: (x + 1,))), torch.randn(4, 4)
    with interpreted():
        for given in (x, x.t(), x, x.t(), x.double(), x):
            assert torch.equal(segment(given, several=several)[0], given + 1)
