"""Rows that see blocks of rows: blocks are collected before rows stream; joined with rows, either is seen by itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamfx.dialect.attention import ATTENTION
from streamfx.ir.facts import Facts
from streamfx.node_meta import MATERIALIZED
from streamfx.tools.report.printer import text_of
from tests.support.exactness import Report, compare
from tests.support.tables import named_cases

pytestmark = pytest.mark.compiled

VOCABULARY, WIDTH, HEADS, BLOCK, WINDOW = 23, 8, 2, 4, 5
INF = float("inf")


class Compressed(nn.Module):
    """`pool` makes a block one row, `attend` joins rows and blocks; with `hides`, a block is seen once all its rows have been."""

    def __init__(self, pool: Pool, attend: Attend, hides: bool = True, layers: int = 1) -> None:
        super().__init__()
        self.pool, self.attend, self.hides = pool, attend, hides
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.queries = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))
        self.keys, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.values, self.gates = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.best_queries, self.best_keys = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.bias = nn.Parameter(torch.randn(BLOCK, 2 * WIDTH))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for queries in self.queries:
            y = F.rms_norm(x, (WIDTH,))
            blocks = self.pool(self, *(part[:, : y.shape[1] // BLOCK * BLOCK] for part in (self.values(y), self.gates(y))))
            mixed = self.attend(self, y, heads(queries(y)), heads(self.keys(y)), blocks)
            x = x + self.out(mixed.transpose(1, 2).flatten(2))
            x = x + self.down(F.silu(self.up(x)))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

    def rows_seen(self, length: int) -> Tensor:
        rows, keys = torch.arange(length)[:, None], torch.arange(length)
        return (keys <= rows) & (keys > rows - WINDOW)

    def blocks_seen(self, length: int) -> Tensor:
        at = torch.arange(length)[:, None]
        return torch.arange(length // BLOCK) < ((at + 1) // BLOCK if self.hides else at + length)


Pool = Callable[[Compressed, Tensor, Tensor], Tensor]
Attend = Callable[[Compressed, Tensor, Tensor, Tensor, Tensor], Tensor]


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def bias(seen: Tensor, hidden: float = -INF) -> Tensor:
    return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, hidden)


# -- blocks


def means(_: Compressed, values: Tensor, gates: Tensor) -> Tensor:
    return values[..., :WIDTH].unflatten(1, (-1, BLOCK)).mean(2) + gates.unflatten(1, (-1, BLOCK))[:, :, 0, :WIDTH]


def weighted(m: Compressed, values: Tensor, gates: Tensor) -> Tensor:
    values, gates = (part.unflatten(1, (-1, BLOCK)) for part in (values, gates))
    return (values * (gates + m.bias).softmax(2)).sum(2)[..., :WIDTH]


def overlapping(m: Compressed, values: Tensor, gates: Tensor) -> Tensor:
    """A block compresses its rows and those of the previous block."""
    values, gates = values.unflatten(1, (-1, BLOCK)), gates.unflatten(1, (-1, BLOCK)) + m.bias
    both = [part.new_full((*part.shape[:2], 2 * BLOCK, WIDTH), fill) for part, fill in ((values, 0.0), (gates, -INF))]
    for made, part in zip(both, (values, gates), strict=True):
        made[:, :, BLOCK:] = part[..., WIDTH:]
        made[:, 1:, :BLOCK] = part[:, :-1, :, :WIDTH]
    return (both[0] * both[1].softmax(2)).sum(2)


# -- attention


def joined(m: Compressed, x: Tensor, q: Tensor, k: Tensor, blocks: Tensor) -> Tensor:
    keys, length = torch.cat([k, heads(blocks)], 2), x.shape[1]
    mask = torch.cat([bias(m.rows_seen(length)), bias(m.blocks_seen(length))], 1)
    return F.scaled_dot_product_attention(q, keys, keys, attn_mask=mask)


def joined_by_flags(m: Compressed, x: Tensor, q: Tensor, k: Tensor, blocks: Tensor) -> Tensor:
    keys, length = torch.cat([heads(blocks), k], 2), x.shape[1]
    return F.scaled_dot_product_attention(q, keys, keys, attn_mask=torch.cat([m.blocks_seen(length), m.rows_seen(length)], 1))


def joined_by_numbers(m: Compressed, x: Tensor, q: Tensor, k: Tensor, blocks: Tensor) -> Tensor:
    keys, length = torch.cat([k, heads(blocks)], 2), x.shape[1]
    mask = torch.cat([bias(seen, torch.finfo(torch.float64).min) for seen in (m.rows_seen(length), m.blocks_seen(length))], 1)
    return F.scaled_dot_product_attention(q, keys, keys.sin(), attn_mask=mask)


def hidden_from_some(hidden: Callable[[Tensor], Tensor]) -> Attend:
    """Finite numbers hide all keys from the first rows, so that eager gives each key its share, however many there are."""

    def attend(m: Compressed, x: Tensor, q: Tensor, k: Tensor, blocks: Tensor) -> Tensor:
        keys, length = torch.cat([k, heads(blocks)], 2), x.shape[1]
        late = torch.arange(length)[:, None] > 1
        mask = hidden(torch.cat([seen & late for seen in (m.rows_seen(length), m.blocks_seen(length))], 1))
        return F.scaled_dot_product_attention(q, keys, keys, attn_mask=mask)

    return attend


def doubled(mask: Tensor, times: int) -> Tensor:
    return mask if not times else doubled(mask + mask, times - 1)


# the amount, and whether the logarithm of a count survives next to it
HIDDEN: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = named_cases("hidden", globals())


def crosswise(m: Compressed, x: Tensor, q: Tensor, k: Tensor, blocks: Tensor) -> Tensor:
    """Values are joined in another order than keys, so that parts of the one are no parts of the other."""
    keys, values = torch.cat([k, heads(blocks)], 2), torch.cat([heads(blocks), k], 2)
    mask = torch.cat([bias(m.rows_seen(x.shape[1])), bias(m.blocks_seen(x.shape[1]))], 1)
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)


def counted(_: Compressed, x: Tensor, q: Tensor, k: Tensor, blocks: Tensor) -> Tensor:
    """The first row sees the first of the joined keys, the second two of them."""
    keys = torch.cat([k, heads(blocks)], 2)
    return F.scaled_dot_product_attention(q, keys, keys, is_causal=True)


def spelled(m: Compressed, x: Tensor, q: Tensor, k: Tensor, blocks: Tensor) -> Tensor:
    keys, length = torch.cat([k, heads(blocks)], 2), x.shape[1]
    mask = torch.cat([bias(m.rows_seen(length)), bias(m.blocks_seen(length))], 1)
    return (q @ keys.mT + mask).softmax(-1) @ keys


def the_best(m: Compressed, x: Tensor, q: Tensor, k: Tensor, blocks: Tensor) -> Tensor:
    """Two of the blocks that a row may see, chosen by separate scores."""
    length = x.shape[1]
    seen = m.blocks_seen(length)
    scores = (m.best_queries(x) @ m.best_keys(blocks).mT).relu().masked_fill(~seen, -INF)
    best = torch.full_like(scores, -INF).scatter(-1, scores.topk(min(2, seen.shape[1]), -1).indices, 0.0) + bias(seen)
    mask = torch.cat([bias(m.rows_seen(length)).expand(len(x), 1, -1, -1), best[:, None]], -1)
    keys = torch.cat([k, heads(blocks)], 2)
    return F.scaled_dot_product_attention(q, keys, keys, attn_mask=mask)


def alone(m: Compressed, x: Tensor, q: Tensor, k: Tensor, blocks: Tensor) -> Tensor:
    """Blocks without a window of keys; each row sees the first block."""
    seen = m.blocks_seen(x.shape[1]) | (torch.arange(x.shape[1] // BLOCK) == 0)
    return (q @ heads(blocks).mT).masked_fill(~seen, -INF).softmax(-1) @ heads(blocks)


# -- tests

JOINED: list[Attend] = [the_best, joined, joined_by_flags, joined_by_numbers]


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
    report = compared(overlapping, attend, 22, attention={f"window({WINDOW})"})
    assert attentions(report.facts[0]) == 2


def test_blocks_that_rows_see_before_they_end() -> None:
    """All blocks are there before any row sees one, so that no mask is asked for."""
    compared(weighted, joined, 22, hides=False, attention={f"window({WINDOW})"})


@pytest.mark.parametrize("attend", [alone], ids=named)
def test_blocks_by_themselves(attend: Attend) -> None:
    report = compared(weighted, attend, 22, streams=None)
    assert any(MATERIALIZED in node.meta for node in report.facts[0].joint.nodes)


def test_blocks_of_several_layers() -> None:
    """A layer is a stage with a separate loop for its blocks: only residual streams are saved."""
    report = compared(weighted, alone, 22, layers=2)
    assert [len(stage.outputs) for stage in report.facts[0].stages] == [1, 1, 0]


@pytest.mark.parametrize("way", HIDDEN)
def test_numbers_that_hide_all_keys_from_a_row_leave_no_count_of_them(way: str) -> None:
    """A large number swamps the logarithm of a count: the keys stay joined, and each has the same share."""
    hidden, is_counted = HIDDEN[way]
    report = compared(weighted, hidden_from_some(hidden), 22, streams=None)
    assert attentions(report.facts[0]) == 1 + is_counted


@pytest.mark.parametrize("attend", [crosswise, counted, spelled], ids=named)
def test_keys_that_cannot_be_seen_by_parts_stay_joined(attend: Attend) -> None:
    is_fused = attend is not spelled
    report = compared(weighted, attend, 22, streams=None, attention=None if is_fused else {"masked"})
    assert attentions(report.facts[0]) == is_fused


def test_keys_are_collected(golden: Callable[[str], None]) -> None:
    """The access roles of a mask over rows and blocks."""
    report = compared(means, alone, 9)
    golden(text_of(report.facts[0], "access_roles"))


def test_joined_keys_are_seen_by_parts(golden: Callable[[str], None]) -> None:
    report = compared(means, joined, 9)
    golden(text_of(report.facts[0], "access_roles"))
