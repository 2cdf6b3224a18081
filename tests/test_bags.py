"""Embedding bags stream if each bag is a row of equally many indices; others fall back, and the reason names a remedy."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamfx import explain
from streamfx.passes.rewrite.views.embedding_bag import FREQUENCY_SCALING, LAST_OFFSET, MAX_MODE, UNEQUAL_LENGTHS  # noqa: F401  (in tests/tables)
from tests.support.canonical import Case, check, graphs, plain, targets
from tests.support.decoders.parts import WIDTH, made
from tests.support.exactness import compare
from tests.support.spread import only
from tests.support.tables import named_cases
from tests.support.used import Used, labelled

pytestmark = pytest.mark.compiled

aten = torch.ops.aten
VOCABULARY, ROWS, EACH = 13, 23, 3
Bag = Callable[..., Tensor]  # of the model, and of indices [b t k]: vectors [b * t, width]


class Bags(Used):
    """A layer of attention on bags, each a row of the sequence."""

    def __init__(self, bag: Bag) -> None:
        super().__init__(labelled)
        self.table, self.own = nn.Parameter(torch.randn(VOCABULARY, WIDTH)), nn.Parameter(torch.randn(EACH))
        self.bag: Any = bag

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return labelled(self, self.hidden(self.bag(self, ids).unflatten(0, ids.shape[:2])), labels)


def in_rows(**how: Any) -> Bag:
    return lambda model, ids: F.embedding_bag(ids.flatten(0, 1), model.table, **how)


def by_offsets(offsets_of: Callable[[int], Tensor], **how: Any) -> Bag:
    return lambda model, ids: F.embedding_bag(ids.flatten(), model.table, offsets_of(len(ids) * ids.shape[1]), **how)


def weighted(model: Bags, ids: Tensor) -> Tensor:
    rows = ids.flatten(0, 1)
    return F.embedding_bag(rows, model.table, mode="sum", padding_idx=2, per_sample_weights=model.own.sin().expand(rows.shape))


STREAM: dict[str, Bag] = named_cases("streams", globals())
FALL_BACK: dict[str, tuple[Bag, str]] = named_cases("fallbacks", globals())


def batch() -> dict[str, Tensor]:
    ids = torch.randint(0, VOCABULARY, (2, ROWS, EACH))
    ids[0, 1], ids[1, 2], ids[1, 3] = 0, VOCABULARY - 1, 2  # bags of padding only
    return {"ids": ids, "labels": ids[..., 0]}


@pytest.mark.parametrize("name", only(["means but for padding", "weighted"], STREAM))
def test_bags_of_one_length_stream(name: str) -> None:
    compare(made(lambda: Bags(STREAM[name])), batch(), also=(5,))


@pytest.mark.parametrize("name", only(["other lengths"], FALL_BACK))
def test_other_bags_fall_back(name: str) -> None:
    bag, why = FALL_BACK[name]
    report = compare(made(lambda: Bags(bag)), batch(), streams=False)
    assert any(f"_embedding_bag.default {why}" in reason for facts in report.facts for reason in facts.reasons())


@pytest.mark.parametrize(
    "bag", [in_rows(mode="sum", sparse=True), lambda model, ids: F.embedding(ids, model.table, sparse=True).sum(-2).flatten(0, 1)]
)
def test_sparse_gradients_have_bytes(bag: Bag) -> None:
    """The bytes of their indices and values: they have no storage. Gradients stay sparse, and equal eager's."""
    model, inputs = made(lambda: Bags(bag)), batch()
    assert "sparse=False" in str(explain(model, **inputs, chunk_size=4))
    model(**inputs).backward()
    eager, model.table.grad = model.table.grad, None  # type: ignore[union-attr]
    torch.compile(model, backend="streambp", options={"chunk_size": 4})(**inputs).backward()
    torch.testing.assert_close(model.table.grad, eager, rtol=1e-12, atol=1e-12)  # type: ignore[union-attr]


# -- the operators alone; if the last bag is longer, there is no rewrite


def backward(mode: int, padding: int = -1, step: int = 3) -> Case:
    """Both gradients of bags: of the table, and of weights."""

    def function(d: Tensor, table: Tensor, weights: Tensor, indices: Tensor) -> tuple[Tensor, ...]:
        offsets, own = torch.arange(0, 4 * step, step), weights if mode == 0 else None
        _, *found = aten._embedding_bag(table, indices, offsets, False, mode, False, own, False, padding)
        made = aten._embedding_bag_backward(d, indices, offsets, *found, 5, False, mode, False, own, padding)
        if mode:
            return (made,)
        return made, aten._embedding_bag_per_sample_weights_backward(d, table, indices, offsets, found[0], mode, padding)

    indices = torch.tensor([0, 1, 2, 2, 2, 2, 3, 4, 3, 1, 0, 2])
    return Case(function, (plain(4, 2), plain(5, 2), plain(12), indices), changes=step == 3, bits=False)


def forward(mode: int, step: int = 3) -> Case:
    def function(table: Tensor, indices: Tensor) -> Tensor:
        made: Tensor = aten._embedding_bag(table, indices, torch.arange(0, 4 * step, step), False, mode)[0]
        return made

    return Case(function, (plain(5, 2), torch.arange(12) % 5), changes=step == 3, bits=False)


ALONE = [forward(0, 2), forward(1, 2), *(backward(mode, *how) for mode in (0, 1) for how in ((), (2,), (-1, 2)))]


@pytest.mark.parametrize("case", ALONE)
def test_the_operators_of_bags(case: Case) -> None:
    check(case)
    bags = [str(target) for target in targets(graphs(case)[1]) if "_embedding_bag" in str(target)]
    assert all(name.endswith("_embedding_bag.default") for name in bags) or not case.changes
