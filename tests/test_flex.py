"""`flex_attention`: score and mask functions are written out, and stream with the span that their masks allow."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex

from streamfx.dialect.attention import ATTENTION
from tests.support.exactness import TOLERANCE, assert_small, compare, errors, outcome, recorder
from tests.support.spread import only
from tests.support.tables import named_cases

pytestmark = pytest.mark.compiled

VOCABULARY, WIDTH, LENGTH, HEADS = 31, 16, 23, 2
Made = Callable[[Tensor], Callable[..., Tensor]]  # of documents, to a mask of batch, head, row and key
Scored = Callable[["Block"], Callable[..., Tensor]]  # to a score of a score, and of these


@pytest.fixture(autouse=True)
def gradients_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPU the public function refuses gradients, although its operators support them."""
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)


class Block(nn.Module):
    fixed: Tensor

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups, self.norm, self.query = groups, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.keys, self.down = nn.Linear(WIDTH, 2 * WIDTH // HEADS * groups), nn.Linear(WIDTH, WIDTH)
        self.slopes, self.table = nn.Parameter(torch.rand(HEADS)), nn.Parameter(torch.randn(HEADS, 64))
        self.register_buffer("fixed", torch.rand(HEADS))

    def forward(self, x: Tensor, score: Any, mask: Any, **how: Any) -> Tensor:
        y = self.norm(x)
        query = self.query(y).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        key, value = self.keys(y).unflatten(-1, (self.groups, 2, -1)).permute(3, 0, 2, 1, 4)
        is_grouped = self.groups != HEADS
        made = flex.flex_attention(query, key, value, score_mod=score, block_mask=mask, enable_gqa=is_grouped, **how)
        made = made[0] * torch.sigmoid(made[1])[..., None] if "return_lse" in how else made
        return x + self.down(F.gelu(made.transpose(1, 2).flatten(2)))


class Decoder(nn.Module):
    def __init__(self, mask: Made | None = None, score: Scored | None = None, groups: int = HEADS, **how: Any) -> None:
        super().__init__()
        self.mask, self.score, self.how = mask, score, how
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList([Block(groups) for _ in range(2)])

    def forward(self, ids: Tensor, labels: Tensor, documents: Tensor, block_mask: Any = None) -> Tensor:
        x, (batch, length) = self.embed(ids), ids.shape
        if self.mask is not None:
            block_mask = flex.create_block_mask(self.mask(documents), batch, None, length, length, device="cpu")
        for block in self.blocks:
            x = block(x, None if self.score is None else self.score(block), block_mask, **self.how)  # type: ignore[arg-type]
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def inputs(length: int = LENGTH) -> dict[str, Any]:
    ids, labels = (torch.randint(0, VOCABULARY, (2, length)) for _ in range(2))
    return {"ids": ids, "labels": labels, "documents": torch.arange(length).expand(2, -1) // 7}


def causal(documents: Tensor) -> Callable[..., Tensor]:
    return lambda b, h, row, key: row >= key


def window(documents: Tensor) -> Callable[..., Tensor]:
    return lambda b, h, row, key: (row >= key) & (row - key < 6)


CAUSAL = {"causal"}
MASKS: dict[str, Made] = named_cases("masks", globals(), "d")
SCORES: dict[str, Scored] = named_cases("scores", globals(), "block")
# arguments, verdict, tolerance; torch promises float32 for the log-sum-exp: rounding as under AOTAutograd alone
CASES: dict[str, tuple[dict[str, Any], set[str], float]] = {
    **{name: ({"mask": mask, "groups": 1}, CAUSAL, TOLERANCE) for name, mask in MASKS.items()},
    **{name: ({"mask": causal, "score": score}, CAUSAL, TOLERANCE) for name, score in SCORES.items()},
    "log-sum-exp": ({"mask": window, "groups": 1, "return_lse": True}, {"window(6)"}, 1e-7),
}


@pytest.mark.parametrize("name", only(["packed", "capped", "log-sum-exp"], CASES))
def test_flex_attention_streams(name: str) -> None:
    how, attention, tolerance = CASES[name]
    report = compare(Decoder(**how).double(), inputs(), also=(23, 5), attention=attention, tolerance=tolerance)
    assert "flex" not in str(report.facts[0].joint.graph)
    is_fused = any(node.target is ATTENTION for node in report.facts[0].joint.nodes)
    assert is_fused == (name in MASKS or name == "slopes")


def test_a_block_mask_may_be_an_input() -> None:
    block_mask = flex.create_block_mask(causal(torch.empty(0)), None, None, LENGTH, LENGTH, device="cpu")
    compare(Decoder().double(), inputs() | {"block_mask": block_mask}, attention=CAUSAL)


@pytest.mark.long
def test_lengths_may_be_dynamic() -> None:
    model = Decoder(causal).double()
    own, backend = copy.deepcopy(model), recorder(chunk_size=7)
    function = torch.compile(own, backend=backend, dynamic=True)
    for length in (LENGTH, 31):
        given = inputs(length)
        assert_small(errors(outcome(function, own, given), outcome(model, model, given)), TOLERANCE, f"{length} rows")
    assert len(backend.compilations) == 1
    assert set(backend.facts[0].key_spans.span_kinds.values()) == CAUSAL


def test_a_score_function_that_cannot_be_expanded_falls_back() -> None:
    """A sum inside of the score function has no form for all scores at once."""

    def score(block: Block) -> Callable[..., Tensor]:
        return lambda score, b, h, row, key: score + block.fixed.expand(3, -1)[row % 3].sum()

    (facts,) = compare(Decoder(causal, score).double(), inputs(), streams=None).facts
    if facts.program is not None:
        pytest.skip("this torch writes it in another way")
    assert "flex_attention" in str(facts.joint.graph)


HALF_SCORES: dict[str, Scored] = named_cases("scores of half precision", globals(), "block")


@pytest.mark.parametrize("name", only(["in float32"], HALF_SCORES))
def test_score_biases_are_not_rounded_to_half_precision(name: str) -> None:
    """Scores are float32 for queries of any type: bfloat16 cannot represent ALiBi's slopes times positions."""
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


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_transformers_flex_attention_streams() -> None:
    """transformers makes its block mask in graphs of their own; compared with its own spelled-out attention."""
    pytest.importorskip("transformers")
    from tests.support import hf

    model = hf.gemma2(attn_implementation="eager")
    ids, seen = torch.randint(3, 23, (2, 19)), torch.arange(19) < torch.tensor([19, 17])[:, None]  # fewer than a window
    given = {"input_ids": ids, "labels": ids, "attention_mask": seen.long()}
    truth = outcome(model.double(), model, given)
    own: Any = copy.deepcopy(model)
    backend = recorder(chunk_size=7, loss_chunk_size=7)
    own.config._attn_implementation = "flex_attention"
    assert_small(errors(outcome(torch.compile(own, backend=backend), own, given), truth), TOLERANCE, "Gemma 2")
    verdicts = {verdict for facts in backend.facts if facts.found_key_spans for verdict in facts.key_spans.span_kinds.values()}
    assert verdicts == CAUSAL | {"window(5)"}
    assert not [reason for facts in backend.facts for reason in facts.reasons()]
