"""Operators with a state of a user's own stream: the state goes from chunk to chunk, and its gradient back."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, fx

from streamfx.ir.facts import Form
from streamfx.runtime.stateful import Backward, Forward
from tests.support import decoders, layouts
from tests.support.exactness import Report, compare
from tests.support.spread import spread
from tests.support.stateful.averages import averages
from tests.support.stateful.blocks import BLOCK, blocks
from tests.support.stateful.selective import selective
from tests.support.stateful.windows import windows
from tests.test_recurrences import LENGTH, WIDTH, Mixed, Mixer

STATES = 4  # numbers that each channel of a selective scan carries


# -- what real layers do


def selected(m: Mixed, x: Tensor, first: Tensor | None = None, skips: bool = False) -> tuple[Tensor, Tensor]:
    """A selective scan as layers call it."""
    left, right = m.up(x)[..., : 2 * STATES].chunk(2, -1)
    return selective(
        x, m.gate(x).sigmoid(), -m.cell.weight_hh[:WIDTH, :STATES].exp(), left, right, m.mu if skips else None, first
    )


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


STREAMS = [
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
    assert all(set(facts.demand.forms[node]) & {Form.ROWS} for node in found)
    assert all(loop.spec.chunk_size % BLOCK == 0 for loop in facts.program.loops) or "block" not in mixer.__name__
