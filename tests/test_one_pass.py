"""A gradient that is a multiple of a number, or of a number per sequence, is found along with the loss: no product runs twice."""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.checkpoint import checkpoint

import streamfx
from streamfx.errors import OverBudgetError
from streamfx.frontend.backend import streambp
from streamfx.ir.facts import known
from tests.support.decoders import WIDTH, Plain, loss_of
from tests.support.exactness import Recorder, assert_small, check_streamed, errors, outcome, recorder
from tests.support.objectives import OBJECTIVES, OF_HIDDEN, ROWS, VOCABULARY, Step, batch_of
from tests.support.spread import only
from tests.support.tables import named_cases
from tests.zoo.configs import INNER
from tests.zoo.configs import VOCABULARY as WORDS
from tests.zoo.models import BATCH, WITHOUT_LABELS, built, grouped_products_in_float64
from tests.zoo.runs import known as known_rows

pytest.importorskip("transformers")

pytestmark = pytest.mark.compiled

aten = torch.ops.aten


class Watch(TorchDispatchMode):
    """Sees the operators of compiled code, too."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class Products(Watch):
    """FLOPs of matrix products as they run, those of compiled code among them: of all, or of those with the vocabulary."""

    def __init__(self, vocabulary: int | None = None) -> None:
        super().__init__()
        self.flops, self.vocabulary = 0, vocabulary

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (aten.mm, aten.addmm, aten.bmm, aten.baddbmm):  # those into given memory, too
            one, other = args[-2:]
            if self.vocabulary is None or self.vocabulary in (*one.shape, *other.shape):
                self.flops += 2 * int(result.numel()) * int(other.shape[-2])
        return result


def products(call: Callable[[], Tensor], vocabulary: int | None = None) -> int:
    with Products(vocabulary) as counted:
        call().backward()
    return counted.flops


# -- objectives

FROZEN = ("lm_head", "embed_tokens", "model.norm")  # as adapters leave them
# Objectives whose gradient is no multiple of one number per sequence: of two, of ratios that all tokens share.
IN_TWO_PASSES = {"dpo_with_sft", "gspo_per_token"}


def check(step: Step, batch: dict[str, Tensor], name: str) -> Recorder:
    truth, backend = outcome(step, step, batch), recorder(chunk_size=5, loss_chunk_size=5)
    assert_small(errors(outcome(torch.compile(step, backend=backend), step, batch), truth), 1e-12, name)
    check_streamed(backend.facts, True, {"causal"})
    return backend


@pytest.mark.parametrize("name", only(["dpo_with_sft", "grpo_reference_given"], OBJECTIVES))
def test_objectives_with_a_frozen_head_run_in_one_pass(name: str) -> None:
    """The head runs as many products as eager, which holds the logits."""
    step, batch = Step(OBJECTIVES[name]), batch_of()
    for weight, parameter in step.models.policy.named_parameters():
        parameter.requires_grad_(not any(part in weight for part in FROZEN))
    check(step, batch, name)
    if name not in OF_HIDDEN:
        own = torch.compile(step, backend=recorder(chunk_size=5, loss_chunk_size=5))
        ours, eager = (products(lambda: run(**batch), VOCABULARY) for run in (own, step))  # noqa: B023
        assert (ours == eager) == (name not in IN_TWO_PASSES)


OF_TWO_MODELS = ("dpo", "grpo", "jensen_shannon")
CASES = [*((name, 1) for name in OBJECTIVES), *((name, 2) for name in OF_TWO_MODELS)]


def of_all_rows(shapes: set[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Shapes of at least half of the batch's rows times the vocabulary: a chunk has fewer."""
    return sorted(shape for shape in shapes if VOCABULARY in shape and torch.Size(shape).numel() >= 2 * (ROWS - 1) * VOCABULARY)


@pytest.mark.parametrize(("name", "layers"), only([("dpo_reference_given", 1)], CASES))
def test_objectives_stream_without_large_tensors(name: str, layers: int) -> None:
    """Also in objectives of two models."""
    step, batch, found = Step(OBJECTIVES[name], layers), batch_of(), []
    assert len(check(step, batch, name).compilations) == 1
    for run in (torch.compile(step, backend=recorder(chunk_size=5, loss_chunk_size=5)), step):
        with Shapes() as shapes:
            run(**batch).backward()
        assert shapes.made, "nothing was seen"
        found.append(of_all_rows(shapes.made))
    assert not found[0], "a tensor of rows times vocabulary"
    assert name in OF_HIDDEN or found[1], "eager has none: the check cannot fail"


@pytest.mark.long
def test_an_index_out_of_range_is_an_error() -> None:
    """As in eager, it must not become a loss."""
    step, batch = Step(OBJECTIVES["reward_of_pairs"]), batch_of()
    compiled = torch.compile(step, backend=recorder(chunk_size=5))
    assert compiled(**batch).isfinite()
    assert compiled(**{**batch, "last": batch["last"] - ROWS}).isfinite()
    with pytest.raises(RuntimeError, match="index out of bounds"):
        compiled(**{**batch, "last": batch["last"] + ROWS})


# -- one layer


def preferences(x: Tensor, head: Tensor, ids: Tensor, halves: bool = True) -> Tensor:
    wide = (x @ head).to(torch.promote_types(x.dtype, torch.float32)).log_softmax(-1)
    sums = wide.gather(-1, ids[..., None]).squeeze(-1).sum(1)
    if not halves:
        return (0.1 * sums).exp().mean()
    chosen, rejected = sums.chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


class Small(nn.Module):
    """One layer of attention and a frozen head."""

    def __init__(self, halves: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.halves, self.embed = halves, nn.Embedding(11, 8, dtype=torch.float64)
        self.out = nn.Linear(8, 8, bias=False, dtype=torch.float64)
        self.head = nn.Parameter(torch.randn(8, 11, dtype=torch.float64), requires_grad=False)

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        heads = x[:, None]
        return x + self.out(F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)[:, 0])

    def forward(self, ids: Tensor) -> Tensor:
        return preferences(self.hidden(ids), self.head, ids, self.halves)


def some_ids(seed: int = 1, batch: int = 4, rows: int = 13) -> Tensor:
    return torch.randint(0, 11, (batch, rows), generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}


def check_steps(step: Callable[[Any], None], halves: bool = True, dynamic: bool | None = None, **options: Any) -> Recorder:
    """What a step does to gradients is the same with the compiled graph and in eager, and found in the forward loop."""
    own, backend = Small(halves), recorder(**{"chunk_size": 4, **options})
    eager = deepcopy(own)
    torch._dynamo.reset()
    for call in (torch.compile(own, backend=backend, dynamic=dynamic), eager):
        step(call)
    torch.testing.assert_close(gradients(own), gradients(eager), rtol=1e-12, atol=1e-14)
    training = [facts for facts in backend.facts if known(facts.program).backward is not None]
    assert "memory_budget" in options or all(facts.stages[-1].gradient_in_forward for facts in training)
    return backend


def in_turn(*sizes: tuple[int, int]) -> Callable[[Any], None]:
    return lambda call: [call(some_ids(batch=batch, rows=rows)).backward() for batch, rows in sizes]  # type: ignore[return-value]


def retained(call: Any) -> None:
    loss = 3 * call(some_ids())
    for _ in range(2):
        loss.backward(retain_graph=True)
    loss.backward()


def overlapping(call: Any) -> None:
    """And one without a backward half."""
    first, second, _ = call(some_ids(1)), call(some_ids(2)), call(some_ids(3))
    (0.5 * first).backward()
    second.backward()
    with torch.no_grad():
        assert torch.isfinite(call(some_ids(4)))


@pytest.mark.parametrize("step", [retained, overlapping])
def test_calls_may_retain_the_graph_or_overlap(step: Callable[[Any], None]) -> None:
    check_steps(step)


def test_lengths_and_batches_may_change() -> None:
    assert len(check_steps(in_turn((4, 13), (4, 9), (4, 4), (4, 17))).facts) == 2
    check_steps(in_turn((4, 13), (6, 9), (8, 8), (2, 17)), halves=False, dynamic=True)


def test_the_smallest_plan_that_an_error_names_fits() -> None:
    """With a last stage of its own for the head or without one, whichever fits."""
    with pytest.raises(OverBudgetError) as found:
        torch.compile(Small(), backend=recorder(memory_budget=1))(some_ids(rows=256))
    check_steps(in_turn((4, 256)), memory_budget=int(found.value.smallest * 1.01))


# -- a model that returns logits and a loss runs no more products than eager with checkpointed layers


class Norm(nn.Module):
    """Its weight is computed outside loops."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + self.weight)


NORMS: dict[str, Callable[[], nn.Module]] = named_cases("norms", globals())


class WithLogits(Plain):
    """Returns a loss and logits."""

    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__(vocabulary=40)
        self.norms, self.checkpointed = nn.ModuleList(norm() for _ in self.norms), False

    def layer(self, x: Tensor, i: int, **more: Any) -> Tensor:
        layer = super().layer
        return checkpoint(layer, x, i, use_reentrant=False) if self.checkpointed else layer(x, i)  # type: ignore[return-value]

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = self.logits(ids)
        return loss_of(logits, ids), logits


@pytest.mark.parametrize("norm", NORMS)
def test_no_product_more_than_with_checkpoints(norm: str) -> None:
    ids, chunks = torch.randint(0, 40, (2, 24)), {"chunk_size": 6, "loss_chunk_size": 6}
    model = WithLogits(NORMS[norm]).double()
    eager = deepcopy(model)
    compiled = torch.compile(model, backend="streambp", options=dict(chunks))
    truth, found = (outcome(lambda ids: run(ids)[0], own, {"ids": ids}) for run, own in ((eager, eager), (compiled, model)))  # noqa: B023
    assert_small(errors(found, truth), 1e-11, norm)
    eager.checkpointed = True
    assert products(lambda: compiled(ids)[0]) <= products(lambda: eager(ids)[0])
    eager.checkpointed = False
    stages = streamfx.explain(eager, ids, **chunks).summary()["stages"]
    assert (stages[-1]["kind"], stages[-1]["loops"]) == ("streamed", 1)  # forward and backward in one


# -- live bytes fall with the chunk size; no step makes a tensor of rows times rows, vocabulary or inner width of an MLP

LENGTH = 61  # prime, so that a dimension of a multiple of it ranges over the rows


def streams_all(row: dict[str, Any]) -> bool:
    return row.get("share") == 1 and not row.get("reasons") and row.get("graphs") == 1 and row["model_type"] not in WITHOUT_LABELS


ALL = [name for name, row in known_rows().items() if streams_all(row)]


def case(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    grouped_products_in_float64()
    model = built(name)
    ids = torch.randint(3, WORDS - 8, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    return model, {"input_ids": ids, "labels": ids.clone()}


class Shapes(Watch):
    """Records the shape of each new tensor, except views that only repeat elements."""

    def __init__(self) -> None:
        super().__init__()
        self.made: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.made |= {tuple(item.shape) for item in tree_iter(out) if is_made(item)}
        return out


def is_made(item: Any) -> bool:
    """Whether a tensor has memory of its own for each element: no repeated view, no stand-in for an output not yet computed."""
    return isinstance(item, Tensor) and 0 not in item.stride() and item.device.type != "meta"


def too_large(shapes: set[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    for shape in shapes:
        over_rows = [size for size in shape if size % LENGTH == 0]
        if len(over_rows) > 1 or (over_rows and (WORDS in shape or INNER in shape)):
            yield shape


def shapes_of(name: str, chunk: int) -> list[tuple[int, ...]]:
    """What a step makes that is too large."""
    model, given = case(name)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=streambp, options={"chunk_size": chunk, "loss_chunk_size": chunk})
    compiled(**given).loss.backward()
    with Shapes() as shapes:
        compiled(**given).loss.backward()
    assert shapes.made, "nothing was seen"
    return sorted(too_large(shapes.made))


def test_an_unchunked_step_has_large_tensors() -> None:
    """The check can fail: one chunk of all rows is everything that is not to be."""
    assert {WORDS, INNER} <= {size for shape in shapes_of("opt", LENGTH) for size in shape}


@pytest.mark.parametrize("name", only(["falcon"], ALL))
def test_a_chunked_step_has_no_large_tensor(name: str) -> None:
    assert not shapes_of(name, 5), "made in one piece"


@pytest.mark.long
@pytest.mark.parametrize("name", ALL)
def test_live_bytes_fall_with_the_chunk_size(name: str) -> None:
    model, given = case(name)
    peaks = []
    for chunk in (LENGTH, 16, 4):
        summary = streamfx.explain(model, **given, options={"chunk_size": chunk, "loss_chunk_size": chunk}).summary()
        peaks.append(summary["peak_bytes"])
    assert all(small <= large for large, small in pairwise(peaks)) and peaks[-1] < 0.8 * peaks[0], peaks
