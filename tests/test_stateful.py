"""Operators with a state of a user's own stream: the state goes from chunk to chunk, and its gradient back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint

import streamfx
from streamfx.ir.facts import StorageClass, known
from streamfx.runtime.custom_scan import Backward, Forward
from tests.support import decoders, layouts
from tests.support.exactness import Report, compare
from tests.support.later_sizes import compare_sizes
from tests.support.spread import spread
from tests.support.stateful.averages import averages
from tests.support.stateful.blocks import BLOCK, blocks
from tests.support.stateful.delta_rule import delta_rule
from tests.support.stateful.selective import selective
from tests.support.stateful.windows import windows
from tests.test_recurrences import LENGTH, WIDTH, Mixed, Mixer

STATES = 4  # numbers that each channel of a selective scan carries


# -- what real layers do


def selected(m: Mixed, x: Tensor, first: Tensor | None = None, skips: bool = False) -> tuple[Tensor, Tensor]:
    """A selective scan as layers call it."""
    left, right = m.up(x)[..., : 2 * STATES].chunk(2, -1)
    decay = -m.cell.weight_hh[:WIDTH, :STATES].exp()
    return selective(x, m.gate(x).sigmoid(), decay, left, right, m.mu if skips else None, first)


def without_a_first_state(m: Mixed, x: Tensor) -> Tensor:
    return m.out(selected(m, x, skips=True)[0])


def learned_first_state(m: Mixed, x: Tensor) -> Tensor:
    first = (m.first[:, None] * m.mu[:STATES]).expand(x.shape[0], WIDTH, STATES).clone()
    return m.out(selected(m, x, first)[0])


def first_state_of_all_rows(m: Mixed, x: Tensor) -> Tensor:
    first = m.gate(x.mean(1))[..., None] * m.mu[:STATES]
    return m.out(selected(m, x, first)[0])


def last_state_for_all_rows(m: Mixed, x: Tensor) -> Tensor:
    y, last = selected(m, x, skips=True)
    return m.out(y) + m.gate(last.sum(-1))[:, None]


def handed_to_the_next(m: Mixed, x: Tensor) -> Tensor:
    y, last = selected(m, x)
    return m.out(selected(m, y, last.tanh())[0])


def side_by_side(m: Mixed, x: Tensor) -> Tensor:
    return m.out(selected(m, x)[0] * selected(m, x.sin(), skips=True)[0])


def the_same_twice(m: Mixed, x: Tensor) -> Tensor:
    return m.out(selected(m, x)[0] + selected(m, x)[0].tanh())


def of_some_rows(m: Mixed, x: Tensor) -> Tensor:
    """In small chunks the first have no row of it."""
    y = selected(m, x[:, 3:], skips=True)[0]
    return m.out(F.pad(y, [0, 0, 3, 0]))


def of_the_first_rows(m: Mixed, x: Tensor) -> Tensor:
    """In small chunks the last have no row of it, and its last state leaves an earlier one."""
    y, last = selected(m, x[:, :-3], learned(m, x), skips=True)
    return m.out(F.pad(y, [0, 0, 0, 3])) + m.gate(last.sum(-1))[:, None]


def learned(m: Mixed, x: Tensor) -> Tensor:
    return (m.first[:, None] * m.mu[:STATES]).expand(x.shape[0], WIDTH, STATES).clone()


def some_gradients(m: Mixed, x: Tensor) -> Tensor:
    left, right = m.up(x)[..., : 2 * STATES].chunk(2, -1)
    weights = -m.cell.weight_hh[:WIDTH, :STATES].detach().exp()
    return m.out(selective(x, m.gate(x).detach().sigmoid(), weights, left, right.detach())[0])


def attended(m: Mixed, x: Tensor, first: Tensor | None = None, asks: bool = False) -> tuple[Tensor, Tensor]:
    q, k, v = (part.unflatten(-1, (2, -1)) for part in m.up(x).chunk(3, -1))
    return blocks(q, k, v, -m.gate(x)[..., :2].exp(), 0.5, first, asks)[:2]


def in_blocks(m: Mixed, x: Tensor) -> Tensor:
    """Chunks begin where blocks do; the states that the kernel saves are made again."""
    return m.out(attended(m, x)[0].flatten(2))


def in_blocks_with_states(m: Mixed, x: Tensor) -> Tensor:
    first = (m.first.view(2, 4, 1) * m.mu[:4]).expand(x.shape[0], 2, 4, 4).clone()
    y, last = attended(m, x, first, asks=True)
    return m.out(y.flatten(2)) + m.gate(last.sum(-1).flatten(1))[:, None]


def convolved(m: Mixed, x: Tensor) -> Tensor:
    weight = m.cell.weight_ih[:WIDTH, :3]
    y, last = windows(x.transpose(1, 2), weight, m.first, None)
    return m.out(y.transpose(1, 2)) + m.gate(last.sum(-1))[:, None]


def convolved_from_learned_rows(m: Mixed, x: Tensor) -> Tensor:
    """Chunks are shorter than the state has rows."""
    weight = m.cell.weight_ih[:WIDTH, :5]
    first = m.up.weight[:WIDTH, :4].expand(x.shape[0], WIDTH, 4).clone()
    return m.out(windows(x.transpose(1, 2), weight, None, first)[0].transpose(1, 2))


def averaged(m: Mixed, x: Tensor) -> Tensor:
    """Two states; the number of rows is an argument."""
    return m.out(averages(x.shape[1], m.gate(x), x, m.mu.sigmoid(), None, None)[0])


def averaged_on_and_on(m: Mixed, x: Tensor) -> Tensor:
    top, bottom = (item.expand(x.shape[0], WIDTH).clone() for item in (m.first, m.mu.exp()))
    y, top, bottom, _ = averages(x.shape[1], m.gate(x), x, m.mu.sigmoid(), top, bottom)
    return m.out(averages(x.shape[1], m.gate(y), x, m.mu.sigmoid(), top, bottom)[0])


def ruled(m: Mixed, x: Tensor, first: Tensor | None = None, asks: bool = False) -> Any:
    q, k, v = (part.unflatten(-1, (2, -1)) for part in m.up(x).chunk(3, -1))
    return delta_rule(q, k, v, 0.1 * k, v.sin(), -q.exp(), first, asks)


def of_a_package(m: Mixed, x: Tensor) -> Tensor:
    """flash-linear-attention's operator, which is known by its name; no state is a tensor of nothing."""
    return m.out(ruled(m, x)[0].flatten(2))


def of_a_package_with_states(m: Mixed, x: Tensor) -> Tensor:
    first = (m.first.view(2, 4, 1) * m.mu[:4]).expand(x.shape[0], 2, 4, 4).clone()
    y, last = ruled(m, x, first, asks=True)
    return m.out(y.flatten(2)) + m.gate(last.sum(-1).flatten(1))[:, None]


STREAMS = [
    of_a_package,
    of_a_package_with_states,
    without_a_first_state,
    learned_first_state,
    in_blocks_with_states,
    averaged,
    convolved,
    side_by_side,
    of_the_first_rows,
    the_same_twice,
    of_some_rows,
    some_gradients,
    first_state_of_all_rows,
    in_blocks,
    convolved_from_learned_rows,
    averaged_on_and_on,
    last_state_for_all_rows,
    handed_to_the_next,
]


def stateful(report: Report) -> list[fx.Node]:
    kinds = (Forward, Backward)
    return [node for facts in report.facts for node in facts.joint.nodes if isinstance(node.target, kinds)]


def compared(mixer: Mixer, length: int = LENGTH, batch: int = 2, layers: int = 1, **options: Any) -> Report:
    ids = layouts.tokens(23, batch, length, 0)
    return compare(decoders.made(lambda: Mixed(mixer, layers)), {"ids": ids, "labels": ids}, **options)


@pytest.mark.parametrize("mixer", spread(STREAMS, 1), ids=lambda mixer: mixer.__name__)
def test_rows_follow_one_another(mixer: Mixer) -> None:
    report = compared(mixer, chunk_size=4, also=(1, 3, LENGTH), streams=None)
    (facts,) = report.facts
    found = stateful(report)
    halves = {isinstance(node.target, Forward) for node in found}
    assert halves == {True, False} and not facts.reasons(), facts.reasons()
    assert all(set(facts.demand.forms[node]) & {StorageClass.ROWS} for node in found)
    loops = known(facts.program).loops
    assert all(loop.spec.chunk_size % BLOCK == 0 for loop in loops) or "block" not in mixer.__name__


@pytest.mark.parametrize("mixer", [learned_first_state, in_blocks, convolved_from_learned_rows], ids=lambda mixer: mixer.__name__)
def test_layers_and_as_many_sequences_as_rows(mixer: Mixer) -> None:
    assert stateful(compared(mixer, layers=2, length=7, batch=7, chunk_size=3, save="projections"))


@pytest.mark.parametrize("how", [{"save": "attention"}, {"keep_every": 2}, {"bodies": "inductor"}], ids=str)
def test_however_it_is_run(how: dict[str, Any]) -> None:
    assert stateful(compared(last_state_for_all_rows, layers=3, chunk_size=4, streams=None, **how))


def test_the_loss_sees_nothing_but_the_last_state() -> None:
    class Last(Mixed):
        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            last = selected(self, F.rms_norm(self.embed(ids), (WIDTH,)), skips=True)[1]
            return F.cross_entropy(self.head(last.sum(-1)), labels[:, 0])

    ids = layouts.tokens(23, 2, LENGTH, 0)
    report = compare(decoders.made(lambda: Last(averaged)), {"ids": ids, "labels": ids}, chunk_size=4, also=(1,), streams=None)
    assert len(stateful(report)) == 2


def test_the_last_state_is_a_result() -> None:
    """The caller differentiates it as well."""

    class Both(Mixed):
        def forward(self, ids: Tensor, labels: Tensor) -> Any:
            y, last = selected(self, F.rms_norm(self.embed(ids), (WIDTH,)))
            return F.cross_entropy(self.head(y).flatten(0, 1), labels.flatten()), last

    ids = layouts.tokens(23, 2, LENGTH, 0)
    report = compare(decoders.made(lambda: Both(averaged)), {"ids": ids, "labels": ids}, chunk_size=4, also=(1,), streams=None)
    assert len(stateful(report)) == 2


def test_rows_lie_as_they_did_when_they_were_traced() -> None:
    """Rows of a chunk out of what the caller gives have gaps between sequences, which the kernel does not take."""

    class Given(Mixed):
        def forward(self, ids: Tensor, labels: Tensor) -> Any:
            y, _ = windows(ids.transpose(1, 2), self.cell.weight_ih[:WIDTH, :3], self.first, None)
            return F.cross_entropy(self.head(y.transpose(1, 2)).flatten(0, 1), labels.flatten())

    draw = torch.Generator().manual_seed(0)
    features = torch.randn(2, LENGTH, WIDTH, generator=draw, dtype=torch.float64).requires_grad_()
    inputs = {"ids": features, "labels": layouts.tokens(23, 2, LENGTH, 0)}
    report = compare(decoders.made(lambda: Given(averaged)), inputs, chunk_size=4, also=(1, 3))
    assert len(stateful(report)) == 2


def test_inside_of_blocks_it_runs_whole() -> None:
    """Rows from the third on: chunks would begin where the operator's blocks do not. From the fifth on they do."""

    def later(start: int) -> Mixer:
        return lambda m, x: m.out(F.pad(attended(m, x[:, start:])[0].flatten(2), [0, 0, start, 0]))

    (facts,) = compared(later(3), chunk_size=4, also=(3,), streams=False).facts
    assert any("takes 4 rows together" in reason for reason in facts.reasons())
    (facts,) = compared(later(4), chunk_size=4, also=(3,)).facts
    assert not facts.reasons()


def test_in_a_layer_that_is_checkpointed() -> None:
    """What is made again in the backward half is another call; its own backward goes with it."""

    def again(m: Mixed, x: Tensor) -> Tensor:
        return checkpoint(lambda x: last_state_for_all_rows(m, x), x, use_reentrant=False)  # type: ignore[no-any-return]

    compared(again, layers=2, chunk_size=4, also=(1,), streams=None)


def test_without_gradients() -> None:
    ids = layouts.tokens(23, 2, LENGTH, 0)
    torch._dynamo.reset()
    model = decoders.made(lambda: Mixed(last_state_for_all_rows))
    compiled = torch.compile(model, backend="streambp", options={"chunk_size": 4, "loss_chunk_size": 4, "strict": True})
    with torch.no_grad():
        torch.testing.assert_close(compiled(ids, ids), model(ids, ids), rtol=1e-12, atol=0)


def test_states_of_a_wider_type() -> None:
    """In float32 beside rows in bfloat16 the carry loses nothing: chunks differ from eager by what their rounding does."""

    def narrow(m: Mixed, x: Tensor) -> Tensor:
        return m.out(averages(x.shape[1], m.gate(x).bfloat16(), x.bfloat16(), m.mu.float().sigmoid(), None, None)[0].to(x.dtype))

    report = compared(narrow, chunk_size=4, also=(1,), streams=None, tolerance=0.02)
    assert len(stateful(report)) == 2


@pytest.mark.parametrize(
    ("mixer", "lengths", "batches"),
    [
        (learned_first_state, (11, 7, 13), (2, 2, 2)),
        (in_blocks_with_states, (11, 7, 13), (2, 2, 2)),
        (convolved, (11, 7, 13), (2, 3, 5)),
        (averaged, (11, 7, 13), (2, 3, 5)),
    ],
    ids=lambda item: getattr(item, "__name__", str(item)),
)
def test_other_lengths_later(mixer: Mixer, lengths: tuple[int, ...], batches: tuple[int, ...]) -> None:
    """The second length compiles code for all of them."""
    options = {"chunk_size": 4, "loss_chunk_size": 4}
    sizes = zip(batches, lengths, strict=True)
    compare_sizes(lambda: decoders.made(lambda: Mixed(mixer)), "streambp", sizes, options=options)


@pytest.mark.parametrize("mixer", [of_some_rows, in_blocks_with_states, averaged_on_and_on], ids=lambda mixer: mixer.__name__)
def test_it_is_explained(mixer: Mixer) -> None:
    """On fake values, chunks without rows among them."""
    torch._dynamo.reset()
    ids = layouts.tokens(23, 2, LENGTH, 0)
    found = streamfx.explain(decoders.made(lambda: Mixed(mixer)), ids, ids, chunk_size=1, loss_chunk_size=1)
    assert {stage.kind for stage in found.stages} == {"streamed"}, str(found)


@torch.library.custom_op("streamfx_tests::by_batch", mutates_args=())
def by_batch(x: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """A decayed sum whose kernel is told of the state how far sequences are apart, and reads each without gaps."""
    assert first.stride(-1) == 1, "last dimension must be contiguous"
    state, rows = first.as_strided(first.shape, (first.stride(0), 1)), []
    for t in range(x.shape[1]):
        state = 0.5 * state + x[:, t]
        rows.append(state)
    return torch.stack(rows, 1), state.clone()


@torch.library.custom_op("streamfx_tests::by_batch_backward", mutates_args=())
def by_batch_backward(dy: Tensor, dlast: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    left, rows = dlast, []
    for t in reversed(range(x.shape[1])):
        rows.append(left + dy[:, t])
        left = 0.5 * rows[-1]
    return torch.stack(rows[::-1], 1), left.clone()


by_batch.register_fake(lambda x, first: (x.new_empty(x.shape), x.new_empty(first.shape)))
by_batch_backward.register_fake(lambda dy, dlast, x: (x.new_empty(x.shape), x.new_empty(dlast.shape)))
by_batch.register_autograd(
    lambda ctx, dy, dlast: by_batch_backward(dy, dlast, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)
streamfx.register_recurrence(
    by_batch,
    by_batch_backward,
    rows={"x": 1},
    results=(1, None),
    states={"first": 1},
    cotangents={"dy": 0, "dlast": 1},
    gradients=("x", "first"),
)


def test_what_is_repeated_lies_as_it_did() -> None:
    """A learned state for all sequences: its numbers lie side by side, as where it is not repeated."""
    report = compared(lambda m, x: m.out(by_batch(x, m.first.expand(x.shape[0], WIDTH))[0]), chunk_size=4, also=(1,))
    assert not [reason for facts in report.facts for reason in facts.reasons()]


def test_a_state_without_elements() -> None:
    """A convolution of one tap has none."""

    def one_tap(m: Mixed, x: Tensor) -> Tensor:
        y, last = windows(x.transpose(1, 2), m.cell.weight_ih[:WIDTH, :1], m.first, None)
        return m.out(y.transpose(1, 2)) + last.sum()

    compared(one_tap, chunk_size=4, also=(1,), streams=None)
