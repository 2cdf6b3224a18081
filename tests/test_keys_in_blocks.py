"""Rows that see blocks of rows: blocks are collected before rows stream; joined with rows, either is seen by itself."""

from collections.abc import Callable

import pytest
import torch

from streamfx.dialect.attention import ATTENTION
from streamfx.ir.facts import Facts
from streamfx.node_meta import MATERIALIZED
from streamfx.tools.report.printer import text_of
from tests.support import compressed
from tests.support.compressed import BLOCK, VOCABULARY, WINDOW, Attend, Compressed, Pool
from tests.support.exactness import Report, compare

pytestmark = pytest.mark.compiled

JOINED: list[Attend] = [compressed.the_best, compressed.joined, compressed.joined_by_flags, compressed.joined_by_numbers]


def named(item: object) -> str:
    return getattr(item, "__name__", str(item))


def compared(pool: Pool, attend: Attend, length: int, hides: bool = True, layers: int = 1, **options: object) -> Report:
    torch.manual_seed(length)
    model = Compressed(pool, attend, hides, layers).double()
    ids, labels = (torch.randint(0, VOCABULARY, (2, length)) for _ in range(2))
    return compare(model, {"ids": ids, "labels": labels}, chunk_size=2 * BLOCK + 1, also=(1, BLOCK, 2 * BLOCK, 64), **options)  # type: ignore[arg-type]


def attentions(facts: Facts) -> int:
    """How many fused attentions the forward half has."""
    return sum(node.target is ATTENTION for node in facts.joint.nodes)


@pytest.mark.parametrize("attend", JOINED, ids=named)
def test_rows_joined_with_blocks(attend: Attend) -> None:
    """Rows see a window of keys, and all blocks; no mask has all rows."""
    report = compared(compressed.overlapping, attend, 22, attention={f"window({WINDOW})"})
    assert attentions(report.facts[0]) == 2


def test_blocks_that_rows_see_before_they_end() -> None:
    """All blocks are there before any row sees one, so that no mask is asked for."""
    compared(compressed.weighted, compressed.joined, 22, hides=False, attention={f"window({WINDOW})"})


@pytest.mark.parametrize("attend", [compressed.alone], ids=named)
def test_blocks_by_themselves(attend: Attend) -> None:
    report = compared(compressed.weighted, attend, 22, streams=None)
    assert any(MATERIALIZED in node.meta for node in report.facts[0].joint.nodes)


def test_blocks_of_several_layers() -> None:
    """A layer is a stage with a separate loop for its blocks: only residual streams are saved."""
    report = compared(compressed.weighted, compressed.alone, 22, layers=2)
    assert [len(stage.outputs) for stage in report.facts[0].stages] == [1, 1, 0]


@pytest.mark.parametrize("way", compressed.HIDDEN)
def test_numbers_that_hide_all_keys_from_a_row_leave_no_count_of_them(way: str) -> None:
    """A large number swamps the logarithm of a count: the keys stay joined, and each has the same share."""
    hidden, is_counted = compressed.HIDDEN[way]
    report = compared(compressed.weighted, compressed.hidden_from_some(hidden), 22, streams=None)
    assert attentions(report.facts[0]) == 1 + is_counted


@pytest.mark.parametrize("attend", [compressed.crosswise, compressed.counted, compressed.spelled], ids=named)
def test_keys_that_cannot_be_seen_by_parts_stay_joined(attend: Attend) -> None:
    is_fused = attend is not compressed.spelled
    report = compared(compressed.weighted, attend, 22, streams=None, attention=None if is_fused else {"masked"})
    assert attentions(report.facts[0]) == is_fused


def test_keys_are_collected(golden: Callable[[str], None]) -> None:
    """The access roles of a mask over rows and blocks."""
    report = compared(compressed.means, compressed.alone, 9)
    golden(text_of(report.facts[0], "access_roles"))


def test_joined_keys_are_seen_by_parts(golden: Callable[[str], None]) -> None:
    report = compared(compressed.means, compressed.joined, 9)
    golden(text_of(report.facts[0], "access_roles"))
