"""Predicted peaks: every way of running a step takes what a run of it takes, and what takes most is named."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import streamfx
from benchmarks.live_bytes import peak_live_bytes
from streamfx.budget import format_bytes
from streamfx.cost import meter, workspaces
from streamfx.cost.meter import Meter
from streamfx.kernels import sdpa
from streamfx.tools.report.text import CHUNK_WORK
from streamfx.torch_private import OpOverload
from streamfx.torch_private.allocations import allocations
from tests.test_plan import TINY

pytestmark = pytest.mark.compiled

VOCABULARY, WIDTH = 50, 32
LENGTHS = (5, 400)  # gradients are most of what is alive, and least


class Layer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "graph breaks":
            torch._dynamo.graph_break()
        if self.kind == "sorts":  # streams nowhere: each row depends on the order of all
            return x + self.down(F.gelu(self.up(x)).erf().sort(1)[0])
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(x)))


def _embedded(model: Decoder, ids: Tensor) -> Tensor:
    return model.embed(ids)


outside: Callable[[Decoder, Tensor], Tensor] = torch._dynamo.disable(_embedded)  # of all graphs


class Decoder(nn.Module):
    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind = kind
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.layers = nn.ModuleList(Layer(kind) for _ in range(3))
        if kind == "tied":
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = outside(self, ids) if self.kind == "graph breaks" else self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def tokens(length: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (2, length))


@pytest.mark.parametrize("kind", ["tied", "graph breaks"])
def test_every_way_holds_its_gradients(kind: str) -> None:
    model = Decoder(kind)
    for length, chunk in zip(LENGTHS, (16, 100), strict=True):
        torch._dynamo.reset()
        summary = streamfx.explain(model, tokens(length), options={"chunk_size": chunk}).summary()
        for name in ("peak_bytes", "baseline_peak_bytes", "checkpointing_peak_bytes"):
            assert summary[name] >= sum(parameter.nbytes for parameter in model.parameters()), (name, length)


@pytest.mark.parametrize("length", LENGTHS)
def test_what_is_predicted_is_what_a_run_takes(length: int) -> None:
    """Whether gradients of an earlier step are there or not."""
    model, ids = Decoder(), tokens(length)
    summary = streamfx.explain(model, ids).summary()
    for name in ("baseline_peak_bytes", "checkpointing_peak_bytes"):
        model.zero_grad()
        with Meter() as meter:
            model(ids).backward()
        assert summary[name] == meter.peak, name
        if name == "baseline_peak_bytes":
            gradients = [parameter.grad for parameter in model.parameters()]
            assert streamfx.explain(model, ids).summary() == summary
            assert all(parameter.grad is gradient for parameter, gradient in zip(model.parameters(), gradients, strict=True))
        for layer in model.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


@pytest.mark.parametrize("bodies", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_what_is_predicted_is_what_the_allocator_gives(bodies: str) -> None:
    """Within 5 %, whoever runs the bodies: Inductor fuses operators, but has buffers of its own."""
    model, ids = Decoder(), tokens(1024)
    options: dict[str, Any] = {"bodies": bodies, "chunk_size": 128, "loss_chunk_size": 128}
    torch._dynamo.reset()
    predicted = streamfx.explain(model, ids, options=options).summary()["peak_bytes"]
    compiled = torch.compile(model, backend="streambp", options=options)
    compiled(ids).backward()
    model.zero_grad()
    assert predicted == pytest.approx(peak_live_bytes(lambda: compiled(ids).backward()), rel=0.05)


def at_peak(kind: str, chunk: int) -> tuple[str, int]:
    """The line that says what takes most at the peak, and by how many bytes checkpoints around layers take less."""
    found = streamfx.explain(Decoder(kind), tokens(1024), chunk_size=chunk, loss_chunk_size=chunk)
    summary = found.summary()
    line = next((line for line in str(found).splitlines() if "most at the peak" in line), "")
    return line, summary["peak_bytes"] - summary["checkpointing_peak_bytes"]


def test_what_takes_more_than_checkpoints_is_named() -> None:
    line, more = at_peak("sorts", 64)
    assert more > 0 and f"more by {format_bytes(more)}" in line
    assert "results of aten.sort" in line and "test_peaks.py" in line and ".erf().sort(1)[0]" in line
    assert at_peak("", 64)[0] == ""
    assert f"most at the peak: {CHUNK_WORK}" in at_peak("", 1024)[0]


THREAD = 2 << 20  # bytes that a CPU's kernel takes for a thread, at most (docs/planner.md)


@pytest.mark.parametrize(
    ("context", "device", "dtype"),
    [(2, "H100", "bfloat16"), (1, "here", "float32"), pytest.param(2, "A100", "float32", marks=pytest.mark.long)],
)
def test_every_attention_of_a_program_is_counted(context: int, device: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of outer graphs, those of bodies, and those inside of others."""
    seen, count = set[Any](), meter._work_of

    def noted(func: Any, *given: Any) -> Any:
        if isinstance(func, OpOverload) and "attention" in func.name():
            seen.add(func)
        return count(func, *given)

    monkeypatch.setattr(meter, "_work_of", noted)
    meter._cached_workspace.cache_clear()
    options = {"save": "inputs", "chunk_size": 128, "loss_chunk_size": 128}
    given: dict[str, Any] = {"device": device, "dtype": dtype, "world": context, "context": context, "shard": "ddp"}
    streamfx.plan({**TINY, "num_hidden_layers": 1}, seq=512, baselines=False, options=options, **given)
    assert (sdpa.ATTENTION_BACKWARD in seen) == (context > 1)
    assert any(func.namespace == "aten" and "backward" in func.name() for func in seen)
    assert seen <= {*workspaces.WORKSPACES, *workspaces.TRACED_OPERATORS}


def workspace(call: Callable[[], Any]) -> int:
    """Bytes that a call has alive at most beside what it returns, by the allocator of the host."""
    with allocations() as found:
        made = call()
        kept = sum(part.untyped_storage().nbytes() for part in made)
        del made
    assert found.is_complete
    return max(accumulate(size for _, size, _ in found.moves)) - kept


@pytest.mark.parametrize("groups", [4, 1])
def test_on_a_cpu_no_more_is_taken_than_what_is_counted_and_a_few_bytes_of_each_thread(groups: int) -> None:
    """The same few at each length."""
    for rows in (256, 2048):
        query, key, value = (torch.zeros(rows, 1, heads, 16).permute(1, 2, 0, 3) for heads in (4, groups, groups))
        given = query, query, key, value, query, torch.zeros(1, 4, rows)  # as rows lie that ranks have exchanged
        for target, own in ((sdpa.ATTENTION, given[1:4]), (sdpa.ATTENTION_BACKWARD, given)):
            counted = meter.traced_workspace(target, own, {"is_causal": True})
            taken = workspace(lambda: target(*own, is_causal=True))  # noqa: B023
            assert counted <= taken <= counted + torch.get_num_threads() * THREAD
