"""A recurrent model's sequence is divided over ranks: states move from rank to rank, and their gradients back. Exact."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch.distributed._functional_collectives import all_gather_tensor_autograd

from streamfx.errors import OptionError, RanksDifferError
from tests.support.collectives import data_of, worst
from tests.support.over_ranks import everybody, facts_of, one_of_many
from tests.support.ranks import on_ranks
from tests.support.scans import scan, with_states_of_constants
from tests.support.stateful.averages import averages
from tests.test_scan_operators import affine

pytestmark = pytest.mark.long

WIDTH, ROWS = 6, 8  # rows of a rank


def gathered(state: Tensor) -> Tensor:
    """The state of each rank, by rank."""
    return all_gather_tensor_autograd(state[None].contiguous(), 0, everybody())


class Layer(nn.Module):
    """A recurrence over the rows of a sequence, from a first state that is learned; alone, or with a part of them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.first, self.mu = nn.Parameter(torch.rand(2, WIDTH)), nn.Parameter(torch.rand(WIDTH))
        self.is_alone = True

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.mix(self.norm(x)).tanh())

    def mix(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Linear(Layer):
    """h_t = a_t h_(t-1) + x_t: all ranks begin with zeros, and then add the states of earlier ranks."""

    def mix(self, x: Tensor) -> Tensor:
        def step(state: tuple[Tensor, Tensor], row: tuple[Tensor, Tensor]) -> Any:
            product, h = row[0] * state[0], row[0] * state[1] + row[1]
            return (product, h), (product.clone(), h.clone())

        zeros = x.new_zeros(len(x), WIDTH)
        products, h = scan(step, (zeros + 1, zeros), (self.gate(x).sigmoid(), x), dim=1)[1]
        return h + products * self.before(products[:, -1], h[:, -1])[:, None]

    def before(self, product: Tensor, last: Tensor) -> Tensor:
        """The state that the first row of this rank begins with."""
        state = self.first[0].expand_as(last)
        if self.is_alone:
            return state
        is_before = (torch.arange(dist.get_world_size()) < dist.get_rank())[:, None, None]
        products, states = gathered(product), gathered(last)
        for decay, own in zip(torch.where(is_before, products, 1.0), torch.where(is_before, states, 0.0), strict=True):
            state = decay * state + own
        return state


class Associative(Linear):
    """The same, by `associative_scan`."""

    def mix(self, x: Tensor) -> Tensor:
        products, h = associative_scan(affine, (self.gate(x).sigmoid(), x), 1, combine_mode="generic")
        return h + products * self.before(products[:, -1], h[:, -1])[:, None]


class RunningSum(Linear):
    """Running sums of rows, and the sums of earlier ranks."""

    def mix(self, x: Tensor) -> Tensor:
        h = (self.gate(x).tanh() * x).cumsum(1)
        return (h + self.before(torch.ones_like(h[:, -1]), h[:, -1])[:, None]).tanh()


class Detached(Linear):
    """No gradient goes to other ranks."""

    def before(self, product: Tensor, last: Tensor) -> Tensor:
        return super().before(product.detach(), last.detach())


class ReadByFew(Linear):
    """A mistake: the first rank does not read the gathered states, so it does not take part in their backward."""

    def before(self, product: Tensor, last: Tensor) -> Tensor:
        state = self.first[0].expand_as(last)
        for decay, own in zip(*(gathered(part)[: dist.get_rank()] for part in (product, last)), strict=True):
            state = decay * state + own
        return state


class InTurn(Layer):
    """One rank after the other."""

    def mix(self, x: Tensor) -> Tensor:
        state = self.begin(self.first, x)
        if self.is_alone:
            return self.rows(x, state)[0]
        rank, last = dist.get_rank(), dist.get_world_size() - 1
        state = state if rank == 0 else self.unread(x, state)
        for turn in range(last):
            if turn == rank:
                made, state = self.rows(x, state)
            state = gathered(state)[turn]  # each rank sends its received state, which fixes the order
        return self.rows(x, state)[0] if rank == last else made + 0 * state.flatten()[0]

    def begin(self, first: Tensor, x: Tensor) -> Tensor:
        return first[0].expand(len(x), -1)

    def unread(self, x: Tensor, state: Tensor) -> Tensor:
        """The first value that a rank sends, which no rank reads: shaped like a state, and computed from data."""
        return x.mean(1).expand_as(state)

    def rows(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The results of rows from a state on, row by row, and the state that they leave."""
        made = []
        for row in x.unbind(1):
            state = (0.5 * state + row + state * self.mu).tanh()
            made.append(state)
        return torch.stack(made, 1), state


class Operator(InTurn):
    """An operator that was declared; it has two states."""

    def begin(self, first: Tensor, x: Tensor) -> Tensor:
        return first[:, None].expand(-1, len(x), -1)

    def rows(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        made, *last, _ = averages(x.shape[1], self.gate(x).tanh(), x, self.mu, *(part.clone() for part in state))
        return made, torch.stack(last)


class Weights(InTurn):
    """A mistake: the unread value is computed from a weight."""

    def unread(self, x: Tensor, state: Tensor) -> Tensor:
        return state


class Decoder(nn.Module):
    """One layer, or several, that have all of the rows or a part of them."""

    def __init__(self, kind: type[Layer], is_alone: bool, layers: int = 2) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.embed, self.head = nn.Embedding(17, WIDTH), nn.Linear(WIDTH, 17, bias=False)
        self.layers = nn.ModuleList(kind() for _ in range(layers))
        for layer in self.layers:
            layer.is_alone = is_alone  # type: ignore[assignment]
        self.double()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def error_of(rank: int, kind: type[Layer], chunk: int, rows: Sequence[int]) -> float:
    """The largest error of a gradient, in chunks of so many rows; all of it has to stream."""
    torch._dynamo.reset()
    truth, model, data = Decoder(kind, True), Decoder(kind, False), data_of(0, sum(rows))
    truth(*data).backward()
    how: dict[str, Any] = {"chunk_size": chunk, "loss_chunk_size": chunk, "check_passes": True, "strict": True, "bodies": "eager"}
    run = torch.compile(model, backend="streambp", options=how)
    (run(*(part.split(list(rows), 1)[rank] for part in data)) * rows[rank] / sum(rows)).backward()
    for parameter, other in zip(model.parameters(), truth.parameters(), strict=True):
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        other.grad = torch.zeros_like(other) if other.grad is None else other.grad
        dist.all_reduce(parameter.grad)
    return worst(model, truth)


TWO, FOUR = (ROWS, ROWS - 3), (5, 9, 6, 7)
KINDS = (Linear, InTurn, Operator, Associative, RunningSum)
CASES = [*((kind, chunk, TWO) for kind in KINDS for chunk in (1, 7)), *((kind, 3, FOUR) for kind in (Linear, InTurn, RunningSum))]


@pytest.mark.parametrize(("kind", "chunk", "rows"), CASES)
def test_gradients_are_those_of_one_process(kind: type[Layer], chunk: int, rows: Sequence[int]) -> None:
    assert max(on_ranks(error_of, kind, chunk, rows, world=len(rows))) < 1e-12


def refused(rank: int, kind: type[Layer]) -> str:
    with pytest.raises(RanksDifferError) as error:
        torch.compile(Decoder(kind, False, 1), backend="streambp", options={"chunk_size": 4})(*data_of(rank, ROWS))
    return error.value.do


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (ReadByFew, "let the loss of each rank depend on every exchanged tensor"),
        (Weights, "let exchanged tensors depend on data"),
    ],
)
def test_deadlocks_are_refused(kind: type[Layer], words: str) -> None:
    """Mistakes for which eager would wait forever."""
    assert all(words in do for do in on_ranks(refused, kind))


# -- truncated adjoints, of one of many ranks


@one_of_many()
@with_states_of_constants
@pytest.mark.parametrize(("kind", "rows"), [(Linear, 3), (InTurn, ROWS), (Operator, 3)])
def test_gradients_of_states_from_other_ranks_are_not_truncated(kind: type[Layer], rows: int) -> None:
    """Such gradients passed through all rows of another rank, even if this rank has no more rows than `adjoints`."""
    with pytest.raises(OptionError, match=f"adjoints={rows} .*\n.*reduce_scatter.*\n.*gathered.*\n.*detach"):
        facts_of(Decoder(kind, False, 1), data_of(0, ROWS), adjoints=rows)


@one_of_many()
@with_states_of_constants
def test_truncation_allows_other_collectives() -> None:
    """States without a gradient; a loss that is the mean over ranks."""
    model = Decoder(Detached, False, 1)

    def loss(ids: Tensor, labels: Tensor) -> Tensor:
        return all_gather_tensor_autograd(model(ids, labels)[None], 0, everybody()).mean()

    assert facts_of(loss, data_of(0, ROWS), adjoints=3).truncations
