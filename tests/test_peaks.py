"""Predicted peaks equal the peaks of real steps; a report names the largest consumer."""

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import streamfx
from benchmarks.live_bytes import peak_live_bytes
from streamfx.budget import format_bytes
from streamfx.cost import meter, workspaces
from streamfx.cost.meter import Meter
from streamfx.dialect.attention import ATTENTION, ATTENTION_BACKWARD
from streamfx.tools.report.text import CHUNK_WORK
from streamfx.torch_private import OpOverload
from streamfx.torch_private.allocations import allocations
from tests.support.layered import Layered
from tests.support.small import tokens
from tests.test_plan import TINY

pytestmark = pytest.mark.compiled


@pytest.mark.parametrize(("kind", "length"), [("", 400), ("tied", 5), ("breaks", 5)])
def test_predicted_peaks_of_eager_are_exact(kind: str, length: int) -> None:
    """Also if parameters hold gradients of an earlier step."""
    model, ids = Layered(3, 32, kind), tokens(2, length)
    summary = streamfx.explain(model, ids).summary()
    assert summary["peak_bytes"] >= sum(parameter.nbytes for parameter in model.parameters())  # their gradients
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
def test_the_predicted_peak_is_the_allocators_within_5_percent(bodies: str) -> None:
    """Inductor fuses operators, but allocates buffers, too."""
    model, ids = Layered(3, 32), tokens(2, 1024)
    options: dict[str, Any] = {"bodies": bodies, "chunk_size": 128, "loss_chunk_size": 128}
    predicted = streamfx.explain(model, ids, options=options).summary()["peak_bytes"]
    compiled = torch.compile(model, backend="streambp", options=options)
    compiled(ids).backward()
    model.zero_grad()
    assert predicted == pytest.approx(peak_live_bytes(lambda: compiled(ids).backward()), rel=0.05)


def at_peak(kind: str, chunk: int) -> tuple[str, int]:
    """The line that names the largest consumer at the peak, and how many bytes more than checkpointing the step takes."""
    ids = tokens(2, 1024)
    found = streamfx.explain(Layered(3, 32, kind), ids, chunk_size=chunk, loss_chunk_size=chunk)
    summary = found.summary()
    line = next((line for line in str(found).splitlines() if "most at the peak" in line), "")
    return line, summary["peak_bytes"] - summary["checkpointing_peak_bytes"]


def test_the_consumer_that_exceeds_checkpointing_is_named() -> None:
    line, more = at_peak("sorts", 64)
    assert more > 0 and f"more by {format_bytes(more)}" in line
    assert "results of aten.sort" in line and "layered.py" in line and ".erf().sort(1)[0]" in line
    assert at_peak("", 64)[0] == ""
    assert f"most at the peak: {CHUNK_WORK}" in at_peak("", 1024)[0]


THREAD = 2 << 20  # bytes that a CPU's kernel takes for a thread, at most (docs/planner.md)


@pytest.mark.parametrize(
    ("context", "device", "dtype"),
    [(2, "H100", "bfloat16"), (1, "here", "float32"), pytest.param(2, "A100", "float32", marks=pytest.mark.long)],
)
def test_every_attention_of_a_program_is_counted(context: int, device: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In outer graphs, in loop bodies, and inside of other operators."""
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
    assert (ATTENTION_BACKWARD in seen) == (context > 1)
    assert any(func.namespace == "aten" and "backward" in func.name() for func in seen)
    assert seen <= {*workspaces.WORKSPACES, *workspaces.TRACED_OPERATORS}


def workspace(call: Callable[[], Any]) -> int:
    """The most bytes of the host's allocator that a call has alive, except for its results."""
    with allocations() as found:
        results = call()
        kept = sum(part.untyped_storage().nbytes() for part in results)
        del results
    assert found.is_complete
    return max(accumulate(size for _, size, _ in found.moves)) - kept


@pytest.mark.parametrize("groups", [4, 1])
def test_attention_on_a_cpu_takes_the_counted_bytes_and_a_constant_per_thread(groups: int) -> None:
    for rows in (256, 2048):
        query, key, value = (torch.zeros(rows, 1, heads, 16).permute(1, 2, 0, 3) for heads in (4, groups, groups))
        given = query, query, key, value, query, torch.zeros(1, 4, rows)  # laid out as rows that ranks have exchanged
        for target, own in ((ATTENTION, given[1:4]), (ATTENTION_BACKWARD, given)):
            counted = meter.traced_workspace(target, own, {"is_causal": True})
            taken = workspace(lambda: target(*own, is_causal=True))  # noqa: B023
            assert counted <= taken <= counted + torch.get_num_threads() * THREAD
