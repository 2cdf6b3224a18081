"""`flex_attention`: score and mask functions are written out, and stream with the span that their masks allow."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex

from streamfx.kernels.sdpa import ATTENTION
from streamfx.passes.rewrite.canonicalize import TABLE
from streamfx.passes.rewrite.driver import simplify
from tests.support.exactness import TOLERANCE, assert_small, compare, errors, outcome, recorder
from tests.support.spread import only

VOCABULARY, WIDTH, LENGTH = 31, 16, 23
Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Score = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def gradients_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPU the public function refuses gradients, which the operators behind it have."""
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)


class Block(nn.Module):
    def __init__(self, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups = heads, groups
        self.norm, self.query = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.keys = nn.Linear(WIDTH, 2 * WIDTH // heads * groups)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.slopes = nn.Parameter(torch.rand(heads))
        self.table = nn.Parameter(torch.randn(heads, 64))
        self.register_buffer("fixed", torch.rand(heads))

    def forward(self, x: Tensor, score: Score | None, mask: Any, **options: Any) -> Tensor:
        batch, length, _ = x.shape
        y = self.norm(x)
        query = self.query(y).view(batch, length, self.heads, -1).transpose(1, 2)
        key, value = self.keys(y).view(batch, length, self.groups, 2, -1).permute(3, 0, 2, 1, 4)
        made = flex.flex_attention(
            query, key, value, score_mod=score, block_mask=mask, enable_gqa=self.heads != self.groups, **options
        )
        if options.get("return_lse"):
            made = made[0] * torch.sigmoid(made[1])[..., None]
        x = x + made.transpose(1, 2).flatten(2)
        return x + self.down(F.gelu(self.up(x)))


class Decoder(nn.Module):
    """`mask` and `score` make functions from (documents, block)."""

    def __init__(
        self,
        mask: Callable[[Tensor], Mask] | None = None,
        score: Callable[[Block], Score] | None = None,
        heads: int = 2,
        groups: int = 2,
        layers: int = 1,
        **options: Any,
    ) -> None:
        super().__init__()
        self.mask, self.score, self.options = mask, score, options
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList([Block(heads, groups) for _ in range(layers)])

    def forward(self, ids: Tensor, labels: Tensor, documents: Tensor, block_mask: Any = None) -> Tensor:
        x, (batch, length) = self.embed(ids), ids.shape
        if self.mask is not None:
            block_mask = flex.create_block_mask(self.mask(documents), batch, None, length, length, device="cpu")
        for block in self.blocks:
            score = None if self.score is None else self.score(block)  # type: ignore[arg-type]
            x = block(x, score, block_mask, **self.options)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def inputs(length: int = LENGTH) -> dict[str, Any]:
    ids, labels = (torch.randint(0, VOCABULARY, (2, length)) for _ in range(2))
    return {"ids": ids, "labels": labels, "documents": torch.arange(length).expand(2, -1) // 7}


# -- masks


def causal(documents: Tensor) -> Mask:
    return lambda b, h, row, key: row >= key


def window(documents: Tensor) -> Mask:
    return lambda b, h, row, key: (row >= key) & (row - key < 6)


def packed(documents: Tensor) -> Mask:
    return lambda b, h, row, key: (row >= key) & (documents[b, row] == documents[b, key])


def packed_in_steps(documents: Tensor) -> Mask:
    return lambda b, h, row, key: (row >= key) & (documents[b][row] == documents[b][key])


def prefix(documents: Tensor) -> Mask:
    return lambda b, h, row, key: (row >= key) | (key < 5)


def hides_rows(documents: Tensor) -> Mask:
    """Some rows see nothing at all: their result is zero."""
    return lambda b, h, row, key: (row >= key) & (row != 4)


def by_head(documents: Tensor) -> Mask:
    return lambda b, h, row, key: (row >= key) & ((h == 0) | (row - key < 3))


@dataclass(frozen=True)
class Case:
    model: dict[str, Any]
    attention: set[str]
    tolerance: float = TOLERANCE

    @property
    def built(self) -> nn.Module:
        return Decoder(**self.model).double()


CAUSAL, MASKED, WINDOW = {"causal"}, {"masked"}, {"window(6)"}
MASKS = {
    "causal": Case({"mask": causal}, CAUSAL),
    "grouped": Case({"mask": causal, "groups": 1}, CAUSAL),
    "window": Case({"mask": window}, WINDOW),
    "packed": Case({"mask": packed}, CAUSAL),
    "packed in steps": Case({"mask": packed_in_steps}, CAUSAL),
    "prefix": Case({"mask": prefix}, MASKED),
    "rows that see nothing": Case({"mask": hides_rows}, CAUSAL),
    "another mask for each head": Case({"mask": by_head, "layers": 2}, CAUSAL),
    "none": Case({}, MASKED),
}


# -- scores


def slopes(block: Block) -> Score:
    return lambda score, b, h, row, key: score - block.fixed[h] * (row - key)  # type: ignore[index]


def learned_slopes(block: Block) -> Score:
    return lambda score, b, h, row, key: score - torch.sigmoid(block.slopes)[h] * (row - key)


def softcap(block: Block) -> Score:
    return lambda score, b, h, row, key: 5 * torch.tanh(score / 5)


def relative(block: Block) -> Score:
    return lambda score, b, h, row, key: score + block.table[h, (row - key).clamp(0, 63)]


def hidden_by_score(block: Block) -> Score:
    return lambda score, b, h, row, key: torch.where(row >= key, score, -float("inf"))


SCORES = {
    "slopes": Case({"mask": causal, "score": slopes}, CAUSAL),
    "learned slopes": Case({"mask": causal, "score": learned_slopes, "layers": 2}, CAUSAL),
    "softcap": Case({"mask": window, "score": softcap}, WINDOW),
    "table of distances": Case({"mask": causal, "score": relative}, CAUSAL),
    "mask in the score": Case({"score": hidden_by_score}, CAUSAL),
    # torch promises float32 for the log-sum-exp: rounding as under AOTAutograd alone
    "log-sum-exp": Case({"mask": window, "groups": 1, "return_lse": True}, WINDOW, 1e-7),
}


@pytest.mark.parametrize("name", only(set(MASKS) - {"causal", "packed in steps", "none"}, MASKS))
def test_masks(name: str) -> None:
    case = MASKS[name]
    report = compare(case.built, inputs(), also=(23, 5), attention=case.attention)
    assert "flex" not in str(report.facts[0].joint.graph)
    assert any(node.target is ATTENTION for node in report.facts[0].joint.nodes)


@pytest.mark.parametrize("name", only(["slopes", "learned slopes", "mask in the score", "log-sum-exp"], SCORES))
def test_scores(name: str) -> None:
    case = SCORES[name]
    report = compare(case.built, inputs(), attention=case.attention, tolerance=case.tolerance)
    is_fused = any(node.target is ATTENTION for node in report.facts[0].joint.nodes)
    assert is_fused == (name == "slopes")


def test_block_mask_from_outside() -> None:
    block_mask = flex.create_block_mask(causal(torch.empty(0)), None, None, LENGTH, LENGTH, device="cpu")
    compare(Decoder().double(), inputs() | {"block_mask": block_mask}, attention=CAUSAL)


def test_without_gradients() -> None:
    model, given = Decoder(causal, softcap).double(), inputs()
    backend = recorder(chunk_size=7, loss_chunk_size=7)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend=backend)(**given), model(**given), rtol=1e-13, atol=1e-13)
    assert backend.facts[0].program is not None


@pytest.mark.parametrize("score", [None, pytest.param(softcap, marks=pytest.mark.long)], ids=["fused", "spelled out"])
def test_dynamic_shapes(score: Callable[[Block], Score] | None) -> None:
    model = Decoder(causal, score).double()
    own, backend = copy.deepcopy(model), recorder(chunk_size=7)
    function = torch.compile(own, backend=backend, dynamic=True)
    for length in (LENGTH, 31):
        given = inputs(length)
        assert_small(errors(outcome(function, own, given), outcome(model, model, given)), TOLERANCE, f"{length} rows")
    assert len(backend.compilations) == 1
    assert set(backend.facts[0].causality.verdicts.values()) == CAUSAL


def test_what_cannot_be_written_out_runs_whole() -> None:
    """A sum inside of the score function has no form for all scores at once."""

    def score(block: Block) -> Score:
        return lambda score, b, h, row, key: score + block.fixed.unsqueeze(0).expand(3, -1)[row % 3].sum()  # type: ignore[operator]

    model = Decoder(causal, score).double()
    report = compare(model, inputs(), streams=None)
    (facts,) = report.facts
    if facts.program is not None:
        pytest.skip("this torch writes it in another way")
    assert "flex_attention" in str(facts.joint.graph)


def test_other_graphs_stay_as_they_are() -> None:
    graph = torch.fx.symbolic_trace(lambda x: (torch.relu(x) + 1,)).graph
    before = str(graph)
    simplify(graph, TABLE)
    assert str(graph) == before


# -- transformers


@pytest.fixture
def warnings_that_do_not_break() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


OF_TRANSFORMERS = [("gemma2", CAUSAL | {"window(5)"})]


HALF_SCORES: dict[str, Callable[[Block], Score]] = {
    "in float32": lambda block: lambda score, b, h, m, n: score + block.get_buffer("fixed")[h] * (n + 1000),
    "whole numbers": lambda block: lambda score, b, h, m, n: score - (1000 + m - n),
    "in the type of queries": lambda block: lambda score, b, h, m, n: score + block.table[h, n],
}


@pytest.mark.parametrize("name", HALF_SCORES)
def test_what_is_added_to_scores_of_half_precision_is_not_rounded(name: str) -> None:
    """Scores are in float32, whatever queries are: ALiBi's slopes times positions are more than bfloat16 tells apart."""
    model = Decoder(causal, HALF_SCORES[name]).bfloat16()
    for block in model.blocks:
        block.fixed = torch.rand(2)
    given = {**inputs(), "labels": torch.randint(0, VOCABULARY, (2, LENGTH))}
    exact = copy.deepcopy(model).double()
    for block in exact.blocks:
        block.fixed = block.fixed.float()  # the very numbers, not rounded on the way
    truth = outcome(exact, exact, given)

    def error(function: Callable[..., Any]) -> float:
        made = outcome(function, model, given)
        pairs = ((made.gradients[name], own) for name, own in truth.gradients.items())
        return max(
            float((one - own).norm() / own.norm()) for one, own in pairs if one is not None and own is not None and own.any()
        )

    assert error(torch.compile(model, backend=recorder(chunk_size=7, loss_chunk_size=7))) <= 1.5 * error(model)


@pytest.mark.parametrize(("model_type", "attention"), only(OF_TRANSFORMERS, [("llama", CAUSAL), *OF_TRANSFORMERS]))
def test_transformers(model_type: str, attention: set[str], warnings_that_do_not_break: None) -> None:
    """transformers makes its block mask in graphs of their own; compared with its own spelled-out attention."""
    pytest.importorskip("transformers")
    from tests.support import hf

    model = getattr(hf, model_type)(attn_implementation="eager")
    ids = torch.randint(3, 23, (2, 19))
    given = {
        "input_ids": ids,
        "labels": ids,
        "attention_mask": (torch.arange(19) < torch.tensor([19, 17])[:, None]).long(),
    }  # fewer than a window
    truth = outcome(model.double(), model, given)
    own, backend = copy.deepcopy(model), recorder(chunk_size=7, loss_chunk_size=7)
    own.config._attn_implementation = "flex_attention"
    assert_small(errors(outcome(torch.compile(own, backend=backend), own, given), truth), TOLERANCE, model_type)
    verdicts = {verdict for facts in backend.facts if facts.found_causality for verdict in facts.causality.verdicts.values()}
    assert verdicts == attention
    assert not [reason for facts in backend.facts for reason in facts.reasons()]
