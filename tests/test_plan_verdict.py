"""What a plan begins with: whether it pays, from which length on, and how far other ways reach."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import streamfx
from streamfx.cost.meter import Meter
from streamfx.kernels.device_kinds import supposed
from streamfx.tools.inspect.eager import checkpointed, eager_cost
from streamfx.tools.inspect.layers import layers_of
from streamfx.tools.planner.baselines import ON_HOST, Peaks, longest, on_host, ways_of
from streamfx.tools.planner.break_even import gains_from
from streamfx.tools.planner.devices import device_called
from streamfx.tools.planner.models import built, configuration, language_inputs, loss_of
from streamfx.tools.planner.predict import predict
from streamfx.tools.planner.search import Limits
from streamfx.tools.report.verdict import CHECKPOINTING, CHUNKED, GAIN, IN_CHUNKS, times

pytest.importorskip("transformers")

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 300}
TINY = {"model_type": "llama", **SIZES, "max_position_embeddings": 4096}
WIDE = {**TINY, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 512}


class Layered(nn.Module):
    """A decoder of somebody's own, too wide to gain anything at few rows."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 512), nn.GELU(), nn.Linear(512, 8)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def peaks_of(report: Any) -> tuple[int, int]:
    return report.prediction.peak_bytes, report.prediction.ways[CHECKPOINTING].peak_bytes


def test_a_plan_begins_with_how_much_less_memory_it_takes() -> None:
    report = streamfx.plan(TINY, seq=2048, chunk_size=64, loss_chunk_size=64, save="inputs")
    ours, other = peaks_of(report)
    found = report.prediction
    share = found.flops / found.ways[CHECKPOINTING].flops
    assert other / ours > 2
    assert (
        str(report)
        .splitlines()[0]
        .endswith(
            f": {other / ours:.1f} times less memory than {CHECKPOINTING} "
            f"({times(found.ways[CHUNKED].peak_bytes / ours)} {IN_CHUNKS}), {share:.2f} of its FLOPs"
        )
    )
    assert found.ways[CHUNKED].peak_bytes < other and CHUNKED in str(report) and CHUNKED in report.summary()["ways"]
    assert report.summary()["verdict"] == report.verdict and report.gains_from is None


def test_a_short_step_gains_nothing_and_says_from_where_on_it_does() -> None:
    model = built(WIDE)
    report = streamfx.plan(model, seq=256)
    found = report.gains_from
    assert found is not None and found > 256
    assert all(parameter.is_meta and parameter.grad is None for parameter in model.parameters())
    assert f" {CHECKPOINTING} at this length" in report.verdict
    assert report.verdict.endswith(f"; from about {found:,} tokens on")
    with supposed(device_called("H100").kind):
        there, half = (
            (one.peak_bytes, one.ways[CHECKPOINTING].peak_bytes)
            for one in (predict(model, language_inputs(1, length), length, {}, True) for length in (found, found // 2))
        )
    assert there[1] >= GAIN * there[0]
    assert half[1] < GAIN * half[0]


@pytest.mark.parametrize("multiple", [1, 3, 64])
def test_from_where_on_there_is_a_gain_does_not_depend_on_the_length_that_was_asked_for(multiple: int) -> None:
    """It is named of the same lengths for all; what was asked for is only where the looking begins."""
    for bend in (20, 300, 5000, 17_000, 100_000):

        def peaks(length: int, bend: int = bend) -> tuple[int, int]:
            return 1000, 1100 if length >= bend else 1099

        asked = {3, 17, 64, 250, 1024, 4500, 15_000, 16_000, 65_536, bend - 1}
        found = {gains_from(peaks, peaks, length, multiple) for length in asked if length < bend}
        (named,) = found
        assert named is not None and bend <= named < 1.26 * (bend + multiple)


def test_a_plan_names_the_same_length_whatever_was_asked_for() -> None:
    def inputs(batch: int, length: int) -> dict[str, Tensor]:
        return {"x": torch.empty(batch, length, 8, device="meta")}

    small = {"chunk_size": 16, "loss_chunk_size": 16, "save": "inputs"}
    reports = [streamfx.plan(Layered(), seq=length, inputs=inputs, options=small) for length in (2, 15, 17, 30)]
    (found,) = {report.gains_from for report in reports}
    assert found is not None and f"from about {found:,} tokens on" in reports[0].verdict


def test_a_length_that_cannot_be_followed_is_no_gain() -> None:
    """Inputs of one's own may know no longer ones."""

    def inputs(batch: int, length: int) -> dict[str, Tensor]:
        if length > 40:
            raise ValueError("no more than 40")
        return {"x": torch.empty(batch, length, 8, device="meta")}

    report = streamfx.plan(Layered(), seq=16, inputs=inputs)
    assert report.gains_from is None and "at this length" in report.verdict


def test_nothing_is_said_of_lengths_where_none_gains() -> None:
    def never(length: int) -> tuple[int, int]:
        return 100, 100

    assert gains_from(never, never, 16, 1) is None
    assert gains_from(lambda length: None, never, 16, 1) is None


@pytest.mark.parametrize(("bend", "multiple"), [(1000, 1), (1000, 64), (17, 1), (40, 1)])
def test_the_length_that_is_named_was_traced(bend: int, multiple: int) -> None:
    traced: list[int] = []

    def peaks(length: int) -> tuple[int, int]:
        return 1000 + length // 100, max(1100, 1100 + 10 * (length - bend))

    def noted(length: int) -> tuple[int, int]:
        traced.append(length)
        return peaks(length)

    found = gains_from(peaks, noted, 16, multiple)
    assert found is not None and found == traced[-1] and found % multiple == 0
    assert peaks(found)[1] >= GAIN * peaks(found)[0] and found < 1.3 * max(bend + 12, 20)
    assert gains_from(peaks, lambda length: (100, 100), 16, multiple) is None  # the guess was wrong


def test_within_a_budget_the_verdict_is_what_fits() -> None:
    wide = streamfx.plan(TINY, seq=512, memory="1G")
    tight = streamfx.plan(TINY, seq=512, memory=peaks_of(wide)[1] - 1)
    assert tight.verdict.startswith("fits into ") and f"{CHECKPOINTING} takes" in tight.verdict
    assert wide.verdict.startswith("fits into 1.0 GiB: nothing streams, because everything fits")
    waiting = replace(wide, limits=Limits(1 << 30, host=1), prediction=replace(wide.prediction, host_bytes=2))
    assert not waiting.summary()["fits"] and "do not fit into the 1 bytes of the host" in waiting.verdict


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"num_hidden_layers": -1}, "num_hidden_layers = -1"),
        ({"num_hidden_layers": 1_000_000}, "num_hidden_layers = 1,000,000"),
        ({"vocab_size": 0}, "vocab_size = 0"),
        ({"num_attention_heads": -4, "num_key_value_heads": -4}, "num_attention_heads = -4"),
    ],
)
def test_sizes_that_no_model_has_are_refused(sizes: dict[str, int], said: str) -> None:
    with pytest.raises(streamfx.PlanError, match=said):
        streamfx.plan({**TINY, **sizes}, seq=64, baselines=False)


def test_the_longest_lengths_of_other_ways_were_traced_and_fit() -> None:
    budget = 24 << 20
    report = streamfx.plan(TINY, memory=budget, max_length=True, seq=256)
    assert list(report.lengths) == [CHECKPOINTING, IN_CHUNKS, f"{IN_CHUNKS}, {ON_HOST}"]
    lengths = list(report.lengths.values())
    assert 0 < lengths[0] < lengths[1] <= lengths[2] and report.max_length is not None
    told = f"{times(report.max_length / lengths[0])} the length of {CHECKPOINTING}"
    assert report.verdict == f"{told}: {report.max_length:,} tokens for {lengths[0]:,}"
    peak = peaks_of(streamfx.plan(TINY, seq=lengths[0], memory="1G"))[1]
    assert 0.9 * budget < peak <= budget
    for way, length in report.lengths.items():
        assert f"{length:,}  {way}: ours is " in str(report)
    assert streamfx.plan({**TINY, "num_hidden_layers": 1}, memory=budget, max_length=True, baselines=False).lengths == {}


def test_a_length_that_nobody_knows_or_that_fits_nowhere() -> None:
    def peaks(peak: Callable[[int], int | None]) -> Peaks:
        return Peaks(peak, peak, lambda length: None)

    assert longest(peaks(lambda length: None), 2, 1000, 256, 256) is None
    assert longest(peaks(lambda length: 5000 + length), 2, 1000, 256, 256) == 0
    assert longest(peaks(lambda length: length), 2, 100_000, 256, 256) == pytest.approx(100_000, rel=0.02)
    assert longest(peaks(lambda length: length), 36, 100_000, 256, 256) == pytest.approx(100_000, rel=0.02)


@pytest.mark.parametrize("name", [IN_CHUNKS, f"{IN_CHUNKS}, {ON_HOST}"])
def test_another_way_computes_the_same_and_takes_what_was_predicted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step as it is predicted, on real tensors: its gradients are eager's, its peak is the one that was told."""
    monkeypatch.setattr("streamfx.tools.planner.baselines.BUSY", 64)
    auto = pytest.importorskip("transformers").AutoModelForCausalLM
    torch.manual_seed(0)
    model = auto.from_config(configuration(TINY)).train()
    ids = torch.randint(0, 300, (1, 256))
    inputs = {"input_ids": ids, "labels": ids}
    hidden_loss = loss_of(ways_of(model)[IN_CHUNKS][0])
    hidden_loss(**inputs).backward()  # type: ignore[no-untyped-call]
    truth = {key: value.grad.clone() for key, value in model.named_parameters()}
    model.zero_grad()

    way, around = ways_of(model)[name]
    predicted = eager_cost(loss_of(ways_of(built(TINY, "float32"))[name][0]), language_inputs(1, 256), around)
    for layer in layers_of(way):
        layer.forward = around(layer.forward)  # type: ignore[method-assign]
    with Meter() as meter:
        loss = loss_of(way)(**inputs)
        loss.backward()  # type: ignore[no-untyped-call]
    assert predicted is not None and meter.peak == pytest.approx(predicted.peak, rel=0.02)

    assert all(torch.allclose(value.grad, truth[key], atol=1e-5) for key, value in model.named_parameters())


def test_checkpoints_on_the_host_are_not_on_the_device() -> None:
    model, inputs = built({**TINY, "num_hidden_layers": 12}), language_inputs(1, 1024)
    chunked = ways_of(model)[IN_CHUNKS][0]
    costs = [eager_cost(loss_of(chunked), inputs, around) for around in (checkpointed, on_host)]
    assert all(costs)
    inner = 12 * 1024 * SIZES["hidden_size"] * 2
    assert costs[0].held - costs[1].held == pytest.approx(inner, rel=0.15)  # type: ignore[union-attr]


def test_a_model_without_a_head_of_its_own_has_no_loss_in_chunks() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    assert list(ways_of(model)) == [CHECKPOINTING, f"with {ON_HOST}"]
