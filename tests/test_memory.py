"""A write into a gradient or an output changes no other value; predicted peaks are those of real steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import streamfx
from benchmarks.live_bytes import peak_live_bytes
from streamfx.budget import format_bytes
from streamfx.cost import meter, workspaces
from streamfx.cost.meter import Meter
from streamfx.dialect.attention import ATTENTION, ATTENTION_BACKWARD
from streamfx.ir.stage_plan import CHUNK_COUNT_RATIOS, MIN_ROWS, MIN_WORKING_SET, SINGLE_CHUNK_SHARE, TILE, WORK_SHARE, AutoChunk
from streamfx.tools.report.text import CHUNK_WORK
from streamfx.torch_private import OpOverload
from streamfx.torch_private.allocations import allocations
from tests.support.exactness import TOLERANCE, assert_small, gradient_errors, in_one_memory
from tests.support.layered import Layered
from tests.support.small import tokens
from tests.support.tables import named_cases
from tests.test_plan import TINY

pytestmark = pytest.mark.compiled

WIDTH, VOCABULARY, LENGTH = 8, 11, 19
OPTIONS: dict[str, Any] = {"chunk_size": 4, "loss_chunk_size": 4, "bodies": "eager"}


class Decoder(nn.Module):
    """One layer, in which `block` adds branches to the residual stream."""

    def __init__(self, block: Callable[[Decoder, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block: Any = block
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.shift, self.scale = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.zeros(2, WIDTH // 2))
        self.table = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.double()

    def layer(self, x: Tensor) -> Tensor:
        q, k, v = (part[:, None] for part in self.qkv(x).chunk(3, -1))
        return self.block(self, x, F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])

    def hidden(self, ids: Tensor) -> Tensor:
        return self.layer(self.embed(ids))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(F.layer_norm(self.hidden(ids), (WIDTH,)))


BLOCKS: dict[str, Callable[[Decoder, Tensor, Tensor], Tensor]] = {
    "parallel": lambda m, x, y: x + m.out(y) + m.one(F.gelu(x)),
    "shifts": lambda m, x, y: x + y + m.shift + m.scale.flatten(),
}


def ids() -> Tensor:
    return torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def compiled(step: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(step, backend="streambp", options={**OPTIONS, **options})


@pytest.mark.parametrize(("name", "outputs"), [*((name, "dense") for name in BLOCKS), ("parallel", "lazy")])
def test_gradients_are_accumulated_and_clipped(name: str, outputs: str) -> None:
    eager = Decoder(BLOCKS[name])
    own = copy.deepcopy(eager)
    gradients = []
    for model, function in ((own, compiled(own, outputs=outputs)), (eager, eager)):
        for _ in range(3):
            F.cross_entropy(function(ids()).flatten(0, 1), ids().flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        gradients.append({name: item.grad for name, item in model.named_parameters()})
    assert not in_one_memory(gradients[0])
    assert_small(gradient_errors(gradients[0], gradients[1]), TOLERANCE, name)


def test_a_gradient_that_is_a_tangent_is_copied() -> None:
    """`table.view(..) + 1`: its gradient is a view of the tangent, which the caller may reuse."""
    own = Decoder(BLOCKS["parallel"])
    tangents = [torch.randn(2, LENGTH, WIDTH, dtype=torch.float64), torch.randn(2, WIDTH // 2, dtype=torch.float64)]
    kept = [item.clone() for item in tangents]
    function = compiled(lambda ids: (own.hidden(ids), own.shift.view(2, -1) + 1))
    for _ in range(3):
        torch.autograd.backward(function(ids()), tangents)
    assert torch.equal(tangents[1], kept[1])
    assert torch.equal(own.shift.grad, 3 * kept[1].flatten())  # type: ignore[arg-type]


def constant(x: Tensor) -> tuple[Tensor, Tensor]:
    weights = torch.tensor([0.5, 1.0, 2.0, 3.0], dtype=torch.float64)
    return weights.view(2, 2), (x[..., :4] + weights).sin()


OUTPUTS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = named_cases("outputs", globals(), "x")


@pytest.mark.parametrize("name", OUTPUTS)
def test_writing_to_an_output_changes_no_other_value(name: str) -> None:
    """After the forward half, before the backward one: neither other outputs nor gradients change."""
    eager = Decoder(BLOCKS["parallel"])
    own = copy.deepcopy(eager)
    found = []

    def step(model: Decoder, ids: Tensor) -> tuple[Tensor, ...]:
        return OUTPUTS[name](model.hidden(ids))

    for model, function in ((own, compiled(step)), (eager, step)):
        with torch.no_grad():
            function(model, ids())[0].mul_(5)  # of no effect on a later step
        first, *others = function(model, ids())
        first.detach().mul_(3)
        with torch.no_grad():
            first.add_(1)
        torch.stack([other.sum() for other in others]).sum().backward()
        assert not in_one_memory({"first": first, **{f"other {i}": other for i, other in enumerate(others)}})
        found.append({name: item.grad for name, item in model.named_parameters()} | {"other": others[0].detach()})
    assert_small(gradient_errors(found[0], found[1]), TOLERANCE, name)


# -- large gradients are scaled and added in place: one buffer, and the same numbers in each run of backward

WORDS = 20_000
TABLE = WORDS * WIDTH * 8  # bytes of the embedding
IDS = torch.randint(0, WORDS, (1, 64), generator=torch.Generator().manual_seed(1))
LARGE: dict[str, Any] = {"chunk_size": 16, "loss_chunk_size": 2}


class Tied(nn.Module):
    """An embedding that is the head as well: all that is large is as large as the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH, dtype=torch.float64)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        heads = x[:, None]
        x = x + self.out(F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)[:, 0])
        return F.cross_entropy(F.linear(x, self.embed.weight).flatten(0, 1), ids.flatten())


def gradients(call: Any, model: nn.Module, runs: int) -> list[tuple[Tensor, ...]]:
    loss = 3 * call(IDS)
    return [torch.autograd.grad(loss, list(model.parameters()), retain_graph=number + 1 < runs) for number in range(runs)]


@pytest.mark.parametrize("runs", [1, 3])
def test_retained_graphs_run_several_times(runs: int) -> None:
    own = Tied()
    eager = copy.deepcopy(own)
    found = gradients(torch.compile(own, backend="streambp", options=LARGE), own, runs)
    for one in found:
        torch.testing.assert_close(one, gradients(eager, eager, 1)[0], rtol=1e-12, atol=1e-14)


def test_a_tied_embedding_has_at_most_two_gradients() -> None:
    """The head's part and the look-up's; as predicted, and as it is."""
    model = Tied()
    predicted = streamfx.explain(model, IDS, options=LARGE).summary()["peak_bytes"]
    call = torch.compile(model, backend="streambp", options=LARGE)
    call(IDS).backward()
    model.zero_grad()
    with Meter() as meter:
        call(IDS).backward()
    assert 2 * TABLE <= meter.peak < 2.9 * TABLE
    assert meter.peak == pytest.approx(predicted, rel=0.05)


# -- predicted peaks equal the peaks of real steps; a report names the largest consumer


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


@given(
    length=st.integers(1, 1 << 20),
    row_bytes=st.integers(1, 1 << 22),
    stream_bytes=st.integers(1, 1 << 16),
    worthwhile=st.integers(0, 1 << 16),
    held=st.integers(0, 100 << 30),
    boundaries=st.integers(0, 100),
)
def test_a_chunk_takes_a_bounded_share_of_memory(
    length: int, row_bytes: int, stream_bytes: int, worthwhile: int, held: int, boundaries: int
) -> None:
    """The share is of the bytes that a step holds, or one value at a stage boundary; rows are rounded to tiles."""
    chunk = AutoChunk(row_bytes, stream_bytes, worthwhile, held, boundaries)
    rows, small = (item.rows(length, row_bytes, stream_bytes) for item in (chunk, AutoChunk(row_bytes, stream_bytes)))
    assert small <= rows <= length
    least = max(MIN_WORKING_SET, length * stream_bytes, MIN_ROWS * row_bytes)
    share = (held + boundaries * length * stream_bytes) // (SINGLE_CHUNK_SHARE if rows == length else WORK_SHARE)
    assert rows * row_bytes <= max(least, min(worthwhile * row_bytes, share)) / CHUNK_COUNT_RATIOS[0] + TILE * row_bytes
