"""Masks that depend on data come down to calls without a mask, and are looked at once per step."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from streamfx.kernels import chunk_attention, mask_programs, plain_attention
from streamfx.kernels.mask_programs import Mask, MaskProgram
from streamfx.kernels.mask_tiles import MaskTile, TileKind, VisibleIntervals, tiles_of_intervals, tiles_of_mask, visible_intervals
from tests.support.small import Padded

INF = float("inf")
LOWEST = torch.finfo(torch.float64).min


# -- masks to pieces


@st.composite
def visible_keys(draw: st.DrawFn, rows: int, keys: int) -> Tensor:
    """What rows see of keys [rows, keys]: causal within documents, up to where padding begins, here and there anything."""
    offset = draw(st.integers(0, keys))
    starts = sorted(draw(st.lists(st.integers(0, keys), max_size=3)))
    row, key = torch.arange(rows)[:, None] + offset, torch.arange(keys)
    document = sum(((key >= start).long() for start in starts), torch.zeros(keys, dtype=torch.long))
    own = sum(((row >= start).long() for start in starts), torch.zeros(rows, 1, dtype=torch.long))
    seen = (own == document) & (key < draw(st.integers(0, keys))) & (key >= draw(st.integers(0, 3)))
    if draw(st.booleans()):
        seen &= key <= row
    if draw(st.booleans()):
        seen &= key > row - draw(st.integers(1, 5))
    for _ in range(draw(st.integers(0, 2))):
        seen[draw(st.integers(0, rows - 1)), draw(st.integers(0, keys - 1))] ^= True
    return seen


@st.composite
def masks(draw: st.DrawFn) -> Tensor:
    """Added to scores: [batch, rows, keys]."""
    rows, keys = draw(st.integers(1, 40)), draw(st.integers(1, 50))
    seen = torch.stack([draw(visible_keys(rows, keys)) for _ in range(draw(st.integers(1, 3)))])
    mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill_(~seen, draw(st.sampled_from([-INF, LOWEST])))
    if draw(st.booleans()):
        mask[0, draw(st.integers(0, rows - 1)), draw(st.integers(0, keys - 1))] = draw(st.sampled_from([1.0, -1e4]))
    return mask


def cells(piece: MaskTile, mask: Tensor) -> Tensor:
    """The mask that a tile represents, for its own rows and keys."""
    part = mask[slice(*piece.batch), slice(*piece.rows), slice(*piece.keys)]
    if piece.kind is TileKind.MIXED:
        return part
    seen = torch.zeros_like(part)
    if piece.documents is not None:
        heads = [part.new_zeros(1, 1, size, 1) for size in part.shape[-2:]]
        seen += plain_attention.causal_bias(heads[0], heads[1], piece.documents)[0]
    if piece.kind is TileKind.CAUSAL:
        rows, keys = part.shape[-2:]
        seen.masked_fill_(torch.ones(rows, keys, dtype=torch.bool).triu(keys - rows + 1), -INF)
    return seen


@given(masks(), st.booleans())
def test_tiles_represent_the_mask(mask: Tensor, packs: bool) -> None:
    """Put together they hide what it hides; each row is in one piece. Documents are one, where they may be."""
    batch, hidden = mask.shape[0], mask <= LOWEST
    made, times = torch.full_like(mask, -INF), torch.zeros(mask.shape[:2])
    for piece in tiles_of_mask(mask, batch, packs_documents=packs):
        made[slice(*piece.batch), slice(*piece.rows), slice(*piece.keys)] = cells(piece, mask)
        times[slice(*piece.batch), slice(*piece.rows)] += 1
    assert (times == 1).all()
    assert torch.equal(made <= LOWEST, hidden)
    assert torch.equal(made[~hidden], mask[~hidden])


@pytest.mark.parametrize("shape", [(1, 1, 9), (2, 7, 1), (1, 1, 1)])
@pytest.mark.parametrize("value", [0.0, -INF, 0.5])
def test_a_mask_of_one_row_or_key_holds_for_all(shape: tuple[int, ...], value: float) -> None:
    mask = torch.zeros(shape)
    mask[..., mask.shape[-1] // 2] = value
    intervals = VisibleIntervals(visible_intervals(mask, True), mask.shape[2])
    assert tiles_of_intervals(intervals, 2, 7, 9, packs_documents=False) == tiles_of_mask(mask.expand(-1, 7, 9), 2)


def test_only_minus_infinity_hides_large_scores() -> None:
    """Beside scores that may be as large, a huge number is something that is added."""
    mask = torch.zeros(1, 8, 8, dtype=torch.float64).masked_fill(torch.ones(8, 8, dtype=torch.bool).triu(1), -1e35)
    assert {piece.kind for piece in tiles_of_mask(mask, 1)} == {TileKind.CAUSAL}
    assert {piece.kind for piece in tiles_of_mask(mask, 1, finite_hides=False)} == {TileKind.MIXED}


def test_a_row_of_nearly_equal_scores_keeps_all_keys() -> None:
    """In float16, exp(-29984 + 30000) is a share that counts, and products lift one above the other."""
    mask = torch.tensor([[-29984.0, -30000.0, -30000.0], [0.0, 0.0, -30000.0]], dtype=torch.float16)
    assert [piece.keys for piece in tiles_of_mask(mask[None, :1], 1)] == [(0, 3)]
    assert [piece.keys for piece in tiles_of_mask(mask[None, 1:], 1)] == [(0, 2)]


def as_mask(dense: Tensor) -> Mask:
    graph = torch.fx.Graph()
    graph.output((graph.placeholder("mask"),))
    return MaskProgram(torch.fx.GraphModule(nn.Module(), graph), [None])(dense)


@given(masks(), st.integers(0, 1000))
def test_attention_by_tiles_is_exact(mask: Tensor, seed: int) -> None:
    """Results, log-sum-exps and gradients; rows that see nothing included."""
    torch.manual_seed(seed)
    batch, rows, keys = mask.shape
    q, gradient = (torch.randn(batch, 4, rows, 8, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(batch, 2, keys, 8, dtype=torch.float64) for _ in range(2))
    dense = mask[:, None]
    out, lse = chunk_attention.forward(q, k, v, dense, None, None)
    own = chunk_attention.forward(q, k, v, as_mask(dense), None, None)
    torch.testing.assert_close(own, (out, lse), rtol=1e-12, atol=1e-12)
    expected = chunk_attention.backward(gradient, q, k, v, out, lse, dense, None, None)
    found = chunk_attention.backward(gradient, q, k, v, *own, as_mask(dense), None, None)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


# -- once per step


class Steps:
    """Three layers under one padding mask, eager and compiled."""

    def __init__(self, bodies: str = "eager") -> None:
        self.layers = Padded(layers=3, width=8).double()
        self.compiled = torch.compile(self.layers, backend="streambp", options={"chunk_size": 16, "bodies": bodies})
        self.x = torch.randn(2, 64, 8, dtype=torch.float64)

    def same(self, keep: Tensor) -> None:
        wanted, found = (
            torch.autograd.grad(run(self.x, keep).square().sum(), self.layers.w) for run in (self.layers, self.compiled)
        )
        assert torch.allclose(found[0], wanted[0], rtol=1e-12)


@pytest.mark.compiled
@pytest.mark.parametrize("bodies", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_a_mask_is_evaluated_once_per_chunk(bodies: str) -> None:
    """Not in each of three layers, and not in backward."""
    steps, keep = Steps(bodies), torch.ones(2, 64, dtype=torch.bool)
    for _ in range(2):
        with mock.patch.object(mask_programs, "visible_intervals", side_effect=visible_intervals) as looked_at:
            steps.same(keep)
        assert looked_at.call_count == 4


@pytest.mark.compiled
def test_a_changed_mask_is_evaluated_again() -> None:
    """Also if it was written through NumPy."""
    steps, keep = Steps(), torch.ones(2, 64, dtype=torch.bool)
    for length in (64, 40, 20):
        keep.copy_(torch.arange(64) < length)
        steps.same(keep)
        keep.numpy()[:] = (torch.arange(64) < length - 10).numpy()
        steps.same(keep)


@pytest.mark.parametrize("chunk", [3, 8])
def test_rows_without_keys_are_exact_for_other_backward_chunks(chunk: int) -> None:
    """What is kept of their log-sum-exp comes from a call of other rows."""
    torch.manual_seed(0)
    query, gradient = torch.randn(2, 1, 2, 8, 4, dtype=torch.float64).unbind()
    key, value = torch.randn(2, 1, 2, 4, 4, dtype=torch.float64).unbind()  # of the last four rows
    given = [item.clone().requires_grad_() for item in (query, key, value)]
    seen = torch.arange(4, 8) <= torch.arange(8)[:, None]
    mixed = F.scaled_dot_product_attention(given[0], given[1], given[2], attn_mask=seen)
    truth = torch.autograd.grad(mixed, given, gradient)
    parts = []
    for start in range(0, 8, chunk):
        stop = min(start + chunk, 8)
        keys = slice(0, max(stop - 4, 0))
        own = query[:, :, start:stop], key[:, :, keys], value[:, :, keys]
        parts.append(chunk_attention.forward(*own, None, start - 4, (None, 0)))
    out, lse = (torch.cat(made, 2) for made in zip(*parts, strict=True))
    found = chunk_attention.backward(gradient, query, key, value, out, lse, None, -4, (None, 0))
    for one, other in zip(found, truth, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)
