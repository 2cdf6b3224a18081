"""Graphs that work on two sequences, one after the other, run as two graphs: exact at any place, and with less memory."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import BartConfig, BartForConditionalGeneration, T5Config, T5ForConditionalGeneration

import streamfx
from streamfx.frontend import split_graphs
from streamfx.frontend.backend import Compilation
from streamfx.torch_private.split import split_before, split_points
from tests.support.exactness import TOLERANCE, assert_small, errors, gradient_errors, outcome
from tests.support.peaks import however_small, peaks
from tests.support.ranks import on_ranks
from tests.support.splits import split_at
from tests.support.translators import WIDTH, WORDS, Counts, Segments, Translator, Unread, batch
from tests.test_deferral import dynamo_graph

pytestmark = pytest.mark.compiled


def compiled(model: nn.Module, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend="streambp", options={"bodies": "eager", "chunk_size": 5, **options})


def assert_exact(model: nn.Module, inputs: Any, run: Any = None) -> None:
    truth = outcome(model, model, inputs)
    assert_small(errors(outcome(compiled(model) if run is None else run, model, inputs), truth), TOLERANCE, type(model).__name__)


@contextmanager
def noted(method: str) -> Iterator[list[tuple[int, Any]]]:
    """How often a part had been split before each call of a method, and the call's result."""
    found, plain = list[tuple[int, Any]](), getattr(split_graphs.SplittableCompilation, method)

    def called(self: Any, *given: Any) -> Any:
        splits = self.num_splits
        found.append((splits, plain(self, *given)))
        return found[-1][1]

    with mock.patch.object(split_graphs.SplittableCompilation, method, called):
        yield found


def test_no_split_is_inside_a_context() -> None:
    """Of autocast, of `no_grad`, and of `vmap`."""

    def function(x: Tensor) -> Tensor:
        a = x.log().sin()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            b = a @ a
            c = b.cos()
        with torch.no_grad():
            d = c.tan()
        e = torch.vmap(lambda row: row.exp())(d + a)
        return e.sinh()

    graph = dynamo_graph(function, torch.randn(3, 3, requires_grad=True)).graph  # type: ignore[arg-type]
    names = {getattr(node.target, "__name__", node.target) for node in split_points(graph)}
    assert {"sin", "sinh"} <= names and names.isdisjoint({"log", "matmul", "cos", "tan", "exp"}), names


def test_no_split_follows_an_unknown_operator() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    known = graph.call_function(torch.sin, (x,))
    unknown = graph.call_function(torch._C._set_deterministic_algorithms, (True,))
    last = graph.call_function(torch.cos, (known,))
    graph.output((last,))
    for node in (x, known, last):
        node.meta["example_value"] = torch.ones(2)
    assert list(split_points(graph)) == [unknown]


def test_both_parts_get_symbolic_sizes() -> None:
    ids, labels = batch()
    torch._dynamo.mark_dynamic(ids, 1)
    module = dynamo_graph(Translator(), ids, labels)
    place = next(node for node in reversed(list(split_points(module.graph))))
    sizes = [node for node in module.graph.find_nodes(op="placeholder") if isinstance(node.meta["example_value"], torch.SymInt)]
    assert sizes and all(set(sizes) <= set(part.inputs) for part in split_before(module, place))


def test_a_part_must_not_write_to_its_inputs() -> None:
    """The first part may have saved it for its backward half."""
    with (
        split_at(lambda places: next(node for node in reversed(places) if node.target == "mul_")),
        noted("compile_in_parts") as found,
    ):
        assert_exact(Counts(1).double(), batch())
    assert [result for _, result in found] == [None]


@pytest.mark.parametrize("way", [pytest.param("detached", marks=pytest.mark.long), "no_grad"])
def test_a_part_needs_a_gradient_for_its_inputs(way: str) -> None:
    model = Unread(way).double()
    with split_at(lambda places: places[len(places) // 3]):
        assert_exact(model, batch())
    with split_at(lambda places: next(place for place in places[61:] if place.target == "chunk")):
        assert_exact(model, batch())


# -- where graphs are split, and how much memory that saves


def bart() -> nn.Module:
    sizes = dict.fromkeys(("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads"), 2)
    widths = {"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    return BartForConditionalGeneration(BartConfig(vocab_size=WORDS, dropout=0.0, **sizes, **widths))


def t5() -> nn.Module:
    sizes = {"d_model": 32, "d_ff": 64, "d_kv": 16, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=WORDS, dropout_rate=0.0, decoder_start_token_id=0, **sizes))


@pytest.mark.long
@pytest.mark.parametrize(("make", "lengths"), [(bart, (128, 128)), (t5, (256, 128))])
def test_encoders_and_decoders_stream_along_their_own_sequences(make: Callable[[], nn.Module], lengths: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model, (ids, labels) = make().double(), batch(*lengths)
    inputs = {"input_ids": ids, "labels": labels}
    with however_small():
        found = streamfx.explain(model, **inputs)
        assert_exact(model, inputs, compiled(model, chunk_size=20))
    assert found.summary()["sequence"] == list(lengths) and len(found.summary()["splits"]) == 1
    assert "split where another sequence begins" in str(found)
    split = peaks(model, lambda run: run(**inputs).loss)
    with mock.patch.object(Compilation, "may_split", False):
        whole = peaks(model, lambda run: run(**inputs).loss)
    assert 1.1 * split.ours < min(whole.ours, *whole.others)
    assert abs(found.summary()["peak_bytes"] - split.ours) <= 0.05 * split.ours


class Stacked(Translator):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        y = self.embed(ids)
        for block in self.decoder:
            y = block(y, is_causal=True)
        return F.cross_entropy((y @ self.embed.weight.T)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.long
def test_no_split_without_a_gain_or_within_a_budget() -> None:
    """Decoders alone, splits that save too little, and graphs with a budget, which one plan has to keep."""
    inputs = batch(64, 24)
    with however_small(), noted("compile_in_parts") as tried:
        alone = streamfx.explain(Stacked(), *inputs)
        assert not tried
        budget = streamfx.explain(Translator().double(), *inputs, memory_budget="1 GiB")
        with mock.patch.object(split_graphs, "MIN_GAIN", 1e9):
            little = streamfx.explain(Translator().double(), *inputs)
    for found in (alone, budget, little):
        assert found.summary()["graphs"] == 1 and not found.summary()["splits"]


class WithLogits(Translator):
    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        memory = self.encoded(ids)
        words = memory @ self.embed.weight.T
        logits = self.logits(memory + words.amax(-1, keepdim=True), labels)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits, words


def test_outputs_of_the_second_part_are_deferred() -> None:
    """Logits are computed on their first use; values that the second part reads are not deferred."""
    model, inputs = WithLogits().double(), batch(96, 24)
    with split_at(lambda places: next(node for node in places if node.target == "amax")):
        loss, logits, words = compiled(model)(*inputs)
    assert type(words) is Tensor and type(logits) is not Tensor
    assert all(torch.allclose(own, wanted) for own, wanted in zip((loss, logits, words), model(*inputs), strict=True))


def in_buckets(rank: int) -> float:
    """DDPOptimizer splits the graph into buckets, and counts the graphs that AOTAutograd makes of each."""
    torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = 8000  # type: ignore[attr-defined]
    torch.manual_seed(0)
    model, inputs = Translator().double(), batch(24, 9)
    eager = copy.deepcopy(model)
    run = compiled(DistributedDataParallel(model, bucket_cap_mb=0.01))
    with split_at(lambda places: places[len(places) // 2], times=9) as chosen:
        for _ in range(2):
            model.zero_grad()
            run(*inputs)[0].backward()
    eager(*inputs)[0].backward()
    assert not chosen
    own, truth = ({name: parameter.grad for name, parameter in one.named_parameters()} for one in (model, eager))
    return max(gradient_errors(own, truth).values())


def test_buckets_of_ddp_are_not_split() -> None:
    assert max(on_ranks(in_buckets)) <= TOLERANCE


# -- several calls in one graph


def test_heads_of_several_calls_keep_no_gradients_of_logits() -> None:
    """Each head's input gradient is computed with its logits; its weight's gradients are one sum."""
    model, inputs = Segments().double(), batch(72, 72)
    with however_small():
        (graph,) = streamfx.explain(model, *inputs, chunk_size=5).call.graphs
    last = graph.facts.stages[-1]
    shapes = [tuple(node.meta["val"].shape) for node in last.gradients]
    assert last.gradient_in_forward and len(shapes) >= 3
    assert sorted(shape for shape in shapes if WORDS in shape) == [(WORDS, WIDTH)], shapes
    assert_exact(model, inputs)
