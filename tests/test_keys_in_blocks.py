"""Rows that see blocks of rows: blocks are collected before rows stream; joined with rows, either is seen by itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from streamfx.ir.facts import Facts
from streamfx.kernels.sdpa import ATTENTION
from streamfx.node_meta import COLLECTED
from streamfx.tools.report.printer import text_of
from tests.support import compressed
from tests.support.compressed import BLOCK, VOCABULARY, WINDOW, Attend, Compressed, Pool
from tests.support.exactness import Report, compare
from tests.support.spread import only

SIZES = (1, BLOCK, 2 * BLOCK, 64)
POOLS: list[Pool] = [compressed.overlapping, compressed.means, compressed.weighted]
JOINED: list[Attend] = [compressed.the_best, compressed.joined, compressed.joined_by_flags, compressed.joined_by_numbers]
OTHERS: list[Attend] = [compressed.alone, compressed.asking, compressed.summed]


def named(item: object) -> str:
    return getattr(item, "__name__", str(item))


def compared(pool: Pool, attend: Attend, length: int, hides: bool = True, layers: int = 1, **options: object) -> Report:
    torch.manual_seed(length)
    model = Compressed(pool, attend, hides, layers).double()
    ids, labels = (torch.randint(0, VOCABULARY, (2, length)) for _ in range(2))
    return compare(model, {"ids": ids, "labels": labels}, chunk_size=2 * BLOCK + 1, also=SIZES, **options)  # type: ignore[arg-type]


def attentions(facts: Facts) -> int:
    """How many fused attentions the forward half has."""
    return sum(node.target is ATTENTION for node in facts.joint.nodes)


@pytest.mark.parametrize("attend", JOINED, ids=named)
@pytest.mark.parametrize("pool", only(POOLS[:1], POOLS), ids=named)
def test_rows_joined_with_blocks(pool: Pool, attend: Attend) -> None:
    """Rows see the window of their own keys, and all blocks; neither is made for all rows."""
    report = compared(pool, attend, 22, attention={f"window({WINDOW})"})
    assert attentions(report.facts[0]) == 2


@pytest.mark.parametrize("length", only([24, 13], [8, 9, 11, 13, 24, 27]))
def test_other_numbers_of_blocks(length: int) -> None:
    compared(compressed.overlapping, compressed.the_best, length, streams=True if length >= 2 * BLOCK else None)


@pytest.mark.parametrize("attend", only([compressed.joined], [compressed.joined, compressed.joined_by_flags]), ids=named)
def test_blocks_that_rows_see_before_they_end(attend: Attend) -> None:
    """All blocks are there before any row sees one, so that no mask is asked for."""
    compared(compressed.weighted, attend, 22, hides=False, attention={f"window({WINDOW})"})


@pytest.mark.parametrize("attend", OTHERS, ids=named)
def test_blocks_by_themselves(attend: Attend) -> None:
    report = compared(compressed.weighted, attend, 22, streams=None)
    assert any(COLLECTED in node.meta for node in report.facts[0].joint.nodes)


@pytest.mark.parametrize("attend", only([compressed.alone], [compressed.alone, compressed.the_best]), ids=named)
def test_blocks_of_several_layers(attend: Attend) -> None:
    """A layer is a stage, though its blocks are made in a loop of their own: residual streams alone are kept."""
    report = compared(compressed.weighted, attend, 22, layers=2)
    assert [len(stage.outputs) for stage in report.facts[0].stages] == [1, 1, 0]


@pytest.mark.parametrize("way", compressed.HIDDEN)
def test_numbers_that_hide_all_keys_from_a_row_leave_no_count_of_them(way: str) -> None:
    """A large number swamps the logarithm of a count: the keys stay joined, and each has the same share."""
    hidden, is_counted = compressed.HIDDEN[way]
    report = compared(compressed.weighted, compressed.hidden_from_some(hidden), 22, streams=None)
    assert attentions(report.facts[0]) == 1 + is_counted


@pytest.mark.parametrize("attend", [compressed.crosswise, compressed.counted], ids=named)
def test_keys_that_cannot_be_seen_by_parts_stay_joined(attend: Attend) -> None:
    report = compared(compressed.weighted, attend, 22, streams=None)
    assert attentions(report.facts[0]) == 1


def test_scores_that_are_spelled_out_stay_joined() -> None:
    report = compared(compressed.weighted, compressed.spelled, 22, streams=None, attention={"masked"})
    assert not attentions(report.facts[0])


def test_blocks_that_stand_behind_the_rows() -> None:
    def attend(m: Compressed, x: Tensor, q: Tensor, k: Tensor, blocks: Tensor) -> Tensor:
        both = torch.cat([k, compressed.heads(blocks)], 2)
        return (both.cumsum(2).sin() * both)[:, :, : x.shape[1]] * q

    compared(compressed.weighted, attend, 22, streams=None)


def test_keys_are_collected(golden: Callable[[str], None]) -> None:
    """What the passes find of a mask over rows and blocks, and where blocks are collected."""
    report = compared(compressed.means, compressed.alone, 9)
    golden(text_of(report.facts[0], "demand"))


def test_joined_keys_are_seen_by_parts(golden: Callable[[str], None]) -> None:
    report = compared(compressed.means, compressed.joined, 9)
    golden(text_of(report.facts[0], "demand"))
