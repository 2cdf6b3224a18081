"""Registered operators with a state: chunks pass on the state, and its gradient. Their memory."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint  # noqa: F401  (in tests/tables)

import streamfx
from benchmarks.live_bytes import peak_live_bytes
from streamfx.ir.facts import known
from streamfx.kernels import causal_conv
from streamfx.runtime.associative import Associative  # noqa: F401  (in tests/tables)
from streamfx.runtime.custom_scan import StatefulRecurrence
from tests.support.causal_conv_package import IS_STAND_IN, causal_conv1d_fn
from tests.support.decoders import made
from tests.support.exactness import Report, compare
from tests.support.mixers import LENGTH, WIDTH, Mixed, Mixer, all_in_rows, are_reversed, compared, mixed, operators, tokens
from tests.support.spread import only
from tests.support.stateful.averages import averages
from tests.support.stateful.blocks import BLOCK, blocks
from tests.support.stateful.delta_rule import delta_rule
from tests.support.stateful.selective import selective
from tests.support.stateful.windows import windows
from tests.support.tables import named_cases
from tests.test_scan_operators import decayed, decayed_by_scan  # noqa: F401  (in tests/tables)

pytestmark = pytest.mark.compiled

STATES = 4  # numbers of each channel's state in a selective scan


def stateful(report: Report) -> int:
    return len(operators(report, StatefulRecurrence))


def learned(m: Mixed, x: Tensor) -> Tensor:
    return (m.first[:, None] * m.mu[:STATES]).expand(x.shape[0], WIDTH, STATES).clone()


def selected(m: Mixed, x: Tensor, first: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """A selective scan as layers call it."""
    left, right = m.up(x)[..., : 2 * STATES].chunk(2, -1)
    decay = -m.cell.weight_hh[:WIDTH, :STATES].exp()
    return selective(x, m.gate(x).sigmoid(), decay, left, right, m.mu, first)


def last_state_for_all_rows(m: Mixed, x: Tensor) -> Tensor:
    y, last = selected(m, x)
    return m.out(y) + m.gate(last.sum(-1))[:, None]


def of_the_first_rows(m: Mixed, x: Tensor) -> Tensor:
    """The last small chunks have no row of it, so its last state leaves an earlier chunk."""
    y, last = selected(m, x[:, :-3], learned(m, x))
    return m.out(F.pad(y, [0, 0, 0, 3])) + m.gate(last.sum(-1))[:, None]


def in_heads(m: Mixed, x: Tensor) -> list[Tensor]:
    return [part.unflatten(-1, (2, -1)) for part in m.up(x).chunk(3, -1)]


def attended(m: Mixed, x: Tensor, first: Tensor | None = None, asks: bool = False) -> tuple[Tensor, Tensor]:
    """Chunks are multiples of blocks; the states that the kernel saves are recomputed."""
    return blocks(*in_heads(m, x), -m.gate(x)[..., :2].exp(), 0.5, first, asks)[:2]


def ruled(m: Mixed, x: Tensor) -> Tensor:
    """flash-linear-attention's operator, known by name."""
    q, k, v = in_heads(m, x)
    return m.out(delta_rule(q, k, v, 0.1 * k, v.sin(), -q.exp(), None, False)[0].flatten(2))


def attended_with_states(m: Mixed, x: Tensor) -> Tensor:
    """From a learned matrix for each head, and with the last state."""
    y, last = attended(m, x, (m.first.view(2, 4, 1) * m.mu[:4]).expand(x.shape[0], 2, 4, 4).clone(), asks=True)
    return m.out(y.flatten(2)) + m.gate(last.sum(-1).flatten(1))[:, None]


def convolved(m: Mixed, x: Tensor, width: int, first: Tensor | None = None) -> Tensor:
    y, last = windows(x.transpose(1, 2), m.cell.weight_ih[:WIDTH, :width], m.first, first)
    return m.out(y.transpose(1, 2)) + m.gate(last.sum(-1))[:, None]


def averaged(m: Mixed, x: Tensor) -> Tensor:
    """Two states; the number of rows is an argument."""
    return m.out(averages(x.shape[1], m.gate(x), x, m.mu.sigmoid(), None, None)[0])


def averaged_twice(m: Mixed, x: Tensor) -> Tensor:
    """The second call starts from the first one's states, the first from learned states that all sequences share."""
    first = (item.expand(x.shape[0], WIDTH) for item in (m.first, m.mu.exp()))
    y, top, bottom, _ = averages(x.shape[1], m.gate(x), x, m.mu.sigmoid(), *first)
    return m.out(averages(x.shape[1], m.gate(y), x, m.mu.sigmoid(), top, bottom)[0])


STREAMS: dict[str, Mixer] = named_cases("streams", globals(), "m, x")
OFTEN = ("of a package", "in blocks", "averaged", "averaged twice", "last state for all rows", "of the first rows")


@pytest.mark.parametrize("name", only(OFTEN, STREAMS))
def test_an_operator_streams(name: str) -> None:
    report = compared(STREAMS[name], chunk_size=4, also=(1, 3, LENGTH), streams=None)
    (facts,) = report.facts
    nodes = operators(report, StatefulRecurrence)
    assert all_in_rows(report, nodes) and {*are_reversed(nodes)} == {False, True}
    assert not facts.reasons(), facts.reasons()
    assert all(loop.spec.chunk_size % BLOCK == 0 for loop in known(facts.program).loops) or "blocks" not in name


def test_a_kernel_gets_contiguous_rows() -> None:
    """Rows of a chunk of an input have gaps between sequences, which the kernel refuses."""

    class Given(Mixed):
        def forward(self, ids: Tensor, labels: Tensor) -> Any:
            return F.cross_entropy(self.head(convolved(self, ids, 3)).flatten(0, 1), labels.flatten())

    features = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64).requires_grad_()
    report = compare(made(Given), {**tokens(), "ids": features}, chunk_size=4, also=(1, 3), streams=None)
    assert stateful(report) == 2


def test_an_operator_that_starts_inside_a_block_falls_back() -> None:
    """With rows from the third on, chunks start inside the operator's blocks. With rows from the fifth on, they do not."""

    def later(start: int) -> Mixer:
        return lambda m, x: m.out(F.pad(attended(m, x[:, start:])[0].flatten(2), [0, 0, start, 0]))

    (facts,) = compared(later(3), chunk_size=4, also=(3,), streams=False).facts
    assert any("reads blocks of 4 rows" in reason for reason in facts.reasons())
    (facts,) = compared(later(4), chunk_size=4, also=(3,)).facts
    assert not facts.reasons()


# -- memory

FEW, MANY, CHUNK = 9, 15, 4  # chunks, and rows of one


def grown(make: Callable[[], nn.Module], kind: Any) -> tuple[dict[str, float], int]:
    """Bytes per chunk, as predicted and as measured, and those of a layer's state."""
    found = []
    for count in (FEW, MANY):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model, inputs = make(), tokens(length=count * CHUNK)
        options: dict[str, Any] = {"chunk_size": CHUNK, "loss_chunk_size": CHUNK, "bodies": "eager"}
        explained = streamfx.explain(model, **inputs, options=options)
        targets: list[Any] = [node.target for graph in explained.call.graphs for node in graph.facts.joint.forward]
        (state,) = {target.carried for target in targets if isinstance(target, kind)}
        figures = {name: explained.summary()[f"{name}_bytes"] for name in ("peak", "saved", "baseline_peak")}
        compiled = torch.compile(model, backend="streambp", options=options)
        step: Callable[[], Any] = lambda: compiled(**inputs).backward()  # noqa: B023, E731
        step()
        model.zero_grad()
        found.append({**figures, "measured": peak_live_bytes(step)})
    return {name: (found[1][name] - few) / (MANY - FEW) for name, few in found[0].items()}, state


FORMS: dict[str, tuple[Mixer, type]] = named_cases("forms", globals())


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
def test_each_layer_adds_one_state_per_chunk_to_the_peak(form: str) -> None:
    """And the rows of one residual stream."""
    mixer, kind = FORMS[form]
    (two, state), (three, _) = (grown(partial(Mixed, *[mixer] * layers), kind) for layers in (2, 3))
    rows = 2 * CHUNK * WIDTH * torch.float32.itemsize
    more = {name: three[name] - two[name] for name in three}
    assert more.pop("baseline_peak") > 1.5 * (state + rows)
    assert all(state <= own <= state + rows for own in more.values()), (more, state, rows)


# -- the causal-conv1d package: the last rows of a chunk are the state of the next

on_cpu = pytest.mark.skipif(not IS_STAND_IN, reason="the package itself runs on GPUs alone")


def convolved_by_package(m: Mixed, x: Tensor, width: int = 4, bias: bool = True, **how: Any) -> Tensor:
    """With contiguous rows, so Dynamo traces the package."""
    rows = m.up(x)[..., :WIDTH].transpose(1, 2).contiguous()
    made: Tensor = causal_conv1d_fn(rows, m.cell.weight_ih[:WIDTH, :width], m.first if bias else None, **how)
    return m.out(made.transpose(1, 2))


@on_cpu
@pytest.mark.parametrize("how", [{"activation": "silu"}, {"bias": False, "width": 2}], ids=str)
def test_the_convolution_streams(how: dict[str, Any]) -> None:
    report = compared(lambda m, x: convolved_by_package(m, x, **how), chunk_size=4, also=(1, 2, 11))
    assert are_reversed(operators(report, StatefulRecurrence)) == [False, True]


@on_cpu
def test_a_convolution_of_packed_sequences_falls_back() -> None:
    """A state has no sequence numbers: rows of the next chunk would see rows of an earlier sequence."""

    def packed(m: Mixed, x: Tensor) -> Tensor:
        number = (torch.arange(x.shape[1]) // 5).to(torch.int32).expand(x.shape[0], -1).contiguous()
        return convolved_by_package(m, x, seq_idx=number)

    (facts,) = compared(packed, chunk_size=4, streams=False).facts
    assert any("seq_idx passed by the caller" in reason for reason in facts.reasons()), facts.reasons()


@on_cpu
def test_a_first_state_breaks_the_graph() -> None:
    """It requires contiguous channels, which Dynamo does not trace. The report names the remedy."""

    def from_a_state(m: Mixed, x: Tensor) -> Tensor:
        first = m.up.weight[:WIDTH, :3].t().expand(x.shape[0], 3, WIDTH).clone().transpose(1, 2)
        rows, weight = m.up(x)[..., :WIDTH].transpose(1, 2), m.cell.weight_ih[:WIDTH, :4]
        y, last = causal_conv1d_fn(rows, weight, initial_states=first, return_final_states=True)
        return m.out(y.transpose(1, 2)) + last.sum(-1)[:, None]

    compared(from_a_state, chunk_size=4, streams=None, graphs=None)
    torch._dynamo.reset()
    assert "x.contiguous()" in str(streamfx.explain(mixed(from_a_state), **tokens(), chunk_size=4))


@on_cpu
@pytest.mark.parametrize(("length", "silu"), [(1, True), (2, False), (7, True)])
def test_our_state_is_the_packages_state(length: int, silu: bool) -> None:
    """The package takes it with contiguous channels."""
    draw = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(2, length, 8, dtype=torch.float64, generator=draw).transpose(1, 2) for _ in range(2))
    first, dlast = (torch.randn(2, 3, 8, dtype=torch.float64, generator=draw).transpose(1, 2) for _ in range(2))
    weight, bias = (torch.randn(*shape, dtype=torch.float64, generator=draw) for shape in ((8, 4), (8,)))
    own = [item.detach().clone(memory_format=torch.preserve_format).requires_grad_() for item in (x, weight, bias, first)]
    out, last = causal_conv1d_fn(*own[:3], initial_states=own[3], return_final_states=True, activation="silu" if silu else None)
    torch.autograd.backward((out, last), (dy, dlast))
    made = causal_conv.forward(x, weight, bias, silu, first)
    gradients = causal_conv.backward(dy, dlast, x, weight, bias, silu, first)
    torch.testing.assert_close([*made, *gradients], [out.detach(), last.detach(), *(item.grad for item in own)])
