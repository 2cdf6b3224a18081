"""`streamfx plan`: configurations, figures, the search for a length, and the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import streamfx
from streamfx.tools.cli import main
from streamfx.tools.inspect.layers import first_layers
from streamfx.tools.planner import devices
from streamfx.tools.planner.devices import device_called
from streamfx.tools.planner.model_names import builtin_names
from streamfx.tools.planner.models import LoraLinear, built, configuration, language_inputs
from streamfx.torch_private import TorchDispatchMode
from tests.support.small import Causal
from tests.support.spread import only

TINY = {
    "model_type": "llama",
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
KEYS = {"max_length", "peak_bytes", "peak_by_term", "flops", "baseline_flops", "stages"}
LEVELS = ("inputs", "products", "attention", "projections")
BILLIONS = {
    "GPT-OSS-20B": 20.91,
    "Gemma-3-12B": 11.77,
    "Gemma-3-1B": 1.00,
    "Gemma-3-27B": 27.01,
    "Gemma-3-4B": 3.88,
    "Llama-3.1-70B": 70.55,
    "Llama-3.1-8B": 8.03,
    "Qwen3-14B": 14.77,
    "Qwen3-32B": 32.76,
    "Qwen3-4B": 4.02,
    "Qwen3-8B": 8.19,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return tmp_path


def test_shipped_configurations_have_the_published_sizes() -> None:
    assert set(builtin_names()) == set(BILLIONS)
    for name in ("Qwen3-4B", "Gemma-3-1B", "GPT-OSS-20B"):
        count = sum(parameter.numel() for parameter in built(name).parameters())
        assert count / 1e9 == pytest.approx(BILLIONS[name], abs=0.006)


@pytest.mark.long
@pytest.mark.parametrize("name", BILLIONS)
def test_all_shipped_configurations(name: str) -> None:
    model = built(name.upper())
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e9 == pytest.approx(BILLIONS[name], abs=0.006)


def test_a_plan_has_all_figures(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(folder), "--seq", "2048", "--chunk-size", "64", "--loss-chunk-size", "64", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert set(summary) >= KEYS
    assert summary["peak_bytes"] == sum(summary["peak_by_term"].values())
    parameters = sum(parameter.nbytes for parameter in built(TINY).parameters())
    assert parameters <= summary["peak_by_term"]["parameters"] < 1.01 * parameters
    assert set(summary["ways"]) == {"eager", "gradient checkpointing", "gradient checkpointing with the loss in chunks"}
    assert summary["flops"] <= summary["ways"]["gradient checkpointing"]["flops"]
    kinds = summary["flops_by_kind"]
    assert {name: sum(counts.values()) for name, counts in kinds.items()} == {
        "streambp": summary["flops"],
        **{name: way["flops"] for name, way in summary["ways"].items()},
        "gradient checkpointing, whole layers": summary["baseline_flops"],
    }
    assert summary["ways"]["gradient checkpointing"]["flops"] < summary["baseline_flops"]
    assert all(stage["kind"] == "streamed" for stage in summary["stages"])


@pytest.mark.parametrize("save", only(["products"], LEVELS))
def test_flops_are_those_of_a_run(save: str) -> None:
    """By a counter of torch's own, to which the CPU's attention was made known: attention, and all else."""
    counted = pytest.importorskip("benchmarks.flop_formulas").counted
    auto = pytest.importorskip("transformers").AutoModelForCausalLM
    options: dict[str, Any] = {"chunk_size": 24, "loss_chunk_size": 16, "save": save}
    planned = streamfx.plan(TINY, seq=64, dtype="float32", baselines=False, options=options).summary()["flops_by_kind"]
    model = auto.from_config(configuration(TINY))
    ids = torch.randint(1, 500, (1, 64))
    loss = torch.compile(lambda: model(input_ids=ids, labels=ids, use_cache=False).loss, backend="streambp", options=options)
    loss().backward()  # compiles
    attention, linear = counted(lambda: loss().backward())
    assert planned["streambp"] == {"linear": linear, "attention": attention}


def test_the_text_is_one_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(folder), "--seq", "1024", "--memory", "4MiB", "--no-baselines"]) == 0
    text = capsys.readouterr().out
    for part in ("a step of 1 x 1,024 tokens, 4.0 MiB of memory", "at the peak", "parameters", "stage inputs", "choices tried"):
        assert part in text
    assert len(text.splitlines()) < 40


def test_memory_that_is_written_over_counts_as_what_it_holds() -> None:
    """At the peak, in the last layer: what entered the head has become the gradient that the head has left."""
    layers, seq = 4, 8192
    options = {"save": "inputs", "chunk_size": 64, "loss_chunk_size": 64, "keep_every": 1}
    terms = streamfx.plan(
        {**TINY, "num_hidden_layers": layers}, seq=seq, baselines=False, options=options
    ).prediction.peak_by_term
    assert terms["stage inputs"] == (layers - 1) * seq * 64 * 2  # the first begins with ids


def test_chunks_of_layers_and_of_the_loss(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--seq", "256", "--no-baselines", "--json", "--chunk-size", "64", "--loss-chunk-size", "32"]
    assert main(["plan", str(folder), *given]) == 0
    stages = json.loads(capsys.readouterr().out)["stages"]
    assert [stage["chunk_size"] for stage in stages] == [64, 64, 32]


@pytest.mark.long
def test_adapters_leave_most_gradients_out() -> None:
    model = built(TINY, lora_rank=4)
    adapted = [module for module in model.modules() if isinstance(module, LoraLinear)]
    assert len(adapted) == 2 * 7
    assert not model.lm_head.weight.requires_grad  # type: ignore[union-attr]
    full = streamfx.plan(TINY, seq=256, baselines=False).summary()
    low = streamfx.plan(TINY, seq=256, lora_rank=4, baselines=False).summary()
    assert low["peak_by_term"].get("gradients", 0) < full["peak_by_term"]["gradients"] / 2
    assert low["flops"] < full["flops"]


@pytest.mark.usefixtures("no_search")
def test_any_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = Causal()

    def inputs(batch: int, length: int) -> dict[str, Any]:
        ids = language_inputs(batch, length)["input_ids"]
        return {"ids": ids, "labels": ids}

    report = streamfx.plan(model, seq=64, batch=2, inputs=inputs)
    assert report.summary()["ways"]["eager"]["peak_bytes"] > 0
    assert "2 x 64 tokens" in str(report)


# -- the search


def test_layers_that_are_left_out_come_back() -> None:
    model = built(TINY)
    whole = [name for name, _ in model.named_modules()]
    with first_layers(model, 1):
        names = [name for name, _ in model.named_modules()]
        assert any(".layers.0" in name for name in names) and not any(".layers.1" in name for name in names)
    assert [name for name, _ in model.named_modules()] == whole


@pytest.mark.long
def test_an_objective_has_a_reference() -> None:
    """Which takes memory of its own unless it is the policy without its adapters."""
    one = {**TINY, "num_hidden_layers": 1}
    sft, dpo, adapted = (
        streamfx.plan(one, seq=256, objective=name, lora_rank=rank, baselines=False).summary()
        for name, rank in (("sft", None), ("dpo", None), ("dpo", 4))
    )
    assert dpo["peak_by_term"]["parameters"] == 2 * sft["peak_by_term"]["parameters"] > adapted["peak_by_term"]["parameters"]
    assert dpo["flops"] > 2.5 * sft["flops"]
    assert not any(reason for stage in dpo["stages"] for reason in stage["reasons"])
    with pytest.raises(streamfx.PlanError, match="sft, dpo, grpo"):
        streamfx.plan(TINY, objective="ppo")


@pytest.mark.long
def test_a_length_that_fits_is_found() -> None:
    report = streamfx.plan(TINY, memory="24MiB", max_length=True, seq=2048, options={"save": "inputs", "keep_every": 1})
    summary = report.summary()
    assert summary["fits"]
    assert summary["max_length"] == summary["length"] >= 4096
    assert 0.9 * (24 << 20) < summary["peak_bytes"] <= 24 << 20


# -- refusals


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing-like-this"], "no configuration 'nothing-like-this'"),
        (["Qwen3-8B", "--memory", "much"], "memory cannot be 'much'"),
        (["Qwen3-8B", "--device", "abacus"], "no rates of a device 'abacus'"),
        (["Qwen3-8B", "--max-length"], "within which memory"),
        (["Qwen3-8B", "--batch", "0"], "batch cannot be 0"),
        (["Qwen3-8B", "--lora-rank", "-1"], "lora_rank cannot be -1"),
    ],
)
def test_refusals_are_short(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments]) == 1
    captured = capsys.readouterr()
    assert said in captured.err
    assert not captured.out


def test_configurations_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "other.json").write_text('{"model_type": "no such type"}')
    (tmp_path / "near.json").write_text('{"model_type": "llamma"}')
    (tmp_path / "list.json").write_text('{"model_type": ["llama"]}')
    (tmp_path / "sizes.json").write_text('{"model_type": "llama", "hidden_size": "wide"}')
    (tmp_path / "empty.json").write_text("{}")
    (tmp_path / "encoder.json").write_text('{"model_type": "t5"}')
    for name, said in (
        ("bad", "not JSON"),
        ("other", "of a model_type that .* does not know"),
        ("near", "did you mean 'llama'"),
        ("list", r"found \['llama'\]"),
        ("sizes", "is no configuration that"),
        ("encoder", "makes no causal language model"),
        ("empty", "has no model_type"),
    ):
        with pytest.raises(streamfx.PlanError, match=said):
            built(tmp_path / f"{name}.json")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"seq": "4096"}, "seq cannot be '4096'"),
        ({"batch": True}, "batch cannot be True"),
        ({"dtype": "int8"}, "no type 'int8'"),
        ({"group": 0}, "group cannot be 0"),
        ({"inputs": {"ids": 3}}, "inputs cannot be {'ids': 3}"),
        ({"device": 3}, "device cannot be 3"),
        ({"objective": "DPO"}, "did you mean 'dpo'"),
        ({"optimizer": "Adam"}, "did you mean 'adamw'"),
        ({"batch": np.int64(0)}, "batch cannot be 0"),
        ({"options": {"chunks": 3}}, "streamfx.plan.* has no option 'chunks'"),
    ],
    ids=str,
)
def test_arguments_that_cannot_be(given: dict[str, Any], said: str) -> None:
    with pytest.raises((streamfx.PlanError, streamfx.OptionError), match=said):
        streamfx.plan(TINY, **given)


@pytest.mark.long
def test_numbers_of_numpy_are_numbers() -> None:
    given = {"seq": 64, "memory": 2**30, "chunk_size": 16}
    numbers: dict[str, Any] = {name: np.int64(value) for name, value in given.items()}
    own, same = (streamfx.plan(TINY, baselines=False, **arguments).summary() for arguments in (given, numbers))
    assert same == own
    assert json.dumps(streamfx.Options(chunk_size=numbers["chunk_size"]).given()) == '{"chunk_size": 16}'


def test_models_that_cannot_be_planned() -> None:
    for given, said in ((None, "a NoneType is no configuration"), (nn.Linear(2, 2), "parameters with data")):
        with pytest.raises(streamfx.PlanError, match=said):
            streamfx.plan(given)


# -- real sizes

LENGTHS = [("Qwen3-8B", None, 150_000), ("Qwen3-4B", None, 330_000), ("Qwen3-8B", 16, 210_000)]
LENGTHS += [("Qwen3-14B", 16, 120_000), ("Qwen3-32B", 16, 28_000)]


@pytest.mark.long
@pytest.mark.parametrize(("name", "rank", "length"), LENGTHS)
def test_real_sizes_fit_in_80_gib(name: str, rank: int | None, length: int) -> None:
    report = streamfx.plan(name, seq=length, lora_rank=rank, options={"keep_every": 1}, baselines=False)
    assert report.summary()["peak_bytes"] <= 80 << 30


@pytest.mark.long
def test_twice_as_long_with_fewer_boundaries() -> None:
    report = streamfx.plan("Qwen3-8B", seq=300_000, options={"keep_every": 4}, baselines=False)
    assert report.summary()["peak_bytes"] <= 80 << 30


@pytest.mark.usefixtures("no_search")
def test_models_are_left_alone() -> None:
    model: nn.Module = built(TINY)
    streamfx.plan(model, seq=128)
    assert all(parameter.is_meta and parameter.grad is None for parameter in model.parameters())


class Operands(TorchDispatchMode):
    """Notes what operators of one kind are given."""

    def __init__(self, operator: Any) -> None:
        super().__init__()
        self.operator = operator
        self.found: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is self.operator:
            self.found.append(args)
        return func(*args, **(kwargs or {}))


def test_a_device_is_measured_on_numbers_as_in_training() -> None:
    """Products of equal numbers draw less power and run at a higher clock. The user's generator is left as it is."""
    state = torch.get_rng_state()
    with Operands(torch.ops.aten.mm.default) as products:
        device = device_called("here")
    assert torch.equal(torch.get_rng_state(), state)
    assert device.flops > 0 and device.bandwidth > 0
    for left, right in products.found:
        assert all(abs(item.mean()) < 0.05 and abs(item.std() - 1) < 0.05 for item in (left, right))
        assert not torch.equal(left, right)


def test_the_first_run_on_a_device_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now, lengths = [0.0], iter((1.0, 5.0, 4.0, 6.0, 7.0))
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    assert devices._seconds(lambda: now.append(now.pop() + next(lengths)), torch.device("cpu")) == 4
    assert next(lengths, None) is None
