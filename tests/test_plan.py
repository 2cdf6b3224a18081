"""`streamfx plan`: configurations and figures; a plan does not change its model."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import streamfx
from streamfx.tools.cli import main
from streamfx.tools.inspect.layers import first_layers
from streamfx.tools.planner.model_names import builtin_names
from streamfx.tools.planner.models import build_model, configuration
from streamfx.tools.planner.recipe import OPTIMIZERS, recipe_of
from streamfx.tools.planner.shards import ALONE, Sharding
from streamfx.tools.report.page import candidate_rows
from tests.support.spread import only
from tests.support.tables import named_cases

pytestmark = pytest.mark.compiled

TINY = named_cases("configuration", globals())
BILLIONS = named_cases("billions of parameters", globals())


@pytest.mark.parametrize("name", only(["Gemma-4-31B", "Qwen3.5-4B"], list(BILLIONS)))
def test_shipped_configurations_have_the_published_sizes(name: str) -> None:
    """Sizes may differ among layers."""
    assert set(builtin_names()) == set(BILLIONS)
    count = sum(parameter.numel() for parameter in build_model(name.upper()).parameters())
    assert count / 1e9 == pytest.approx(BILLIONS[name], abs=0.006)


def test_a_plan_has_all_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    assert main(["plan", str(tmp_path), "--seq", "2048", "--chunk-size", "64", "--loss-chunk-size", "32", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["max_length"] is None
    assert options_in(summary["recipe"]) == {"chunk_size": 64, "loss_chunk_size": 32}
    assert summary["peak_bytes"] == sum(summary["peak_by_term"].values())
    parameters = sum(parameter.nbytes for parameter in build_model(TINY).parameters())
    assert parameters <= summary["peak_by_term"]["parameters"] < 1.01 * parameters
    assert set(summary["ways"]) == {"eager", "gradient checkpointing", "gradient checkpointing with the loss in chunks"}
    assert summary["flops"] <= summary["ways"]["gradient checkpointing"]["flops"] < summary["baseline_flops"]
    kinds = summary["flops_by_kind"]
    assert {name: sum(counts.values()) for name, counts in kinds.items()} == {
        "streambp": summary["flops"],
        **{name: way["flops"] for name, way in summary["ways"].items()},
        "gradient checkpointing, whole layers": summary["baseline_flops"],
    }
    assert [(stage["kind"], stage["chunk_size"]) for stage in summary["stages"]] == [("streamed", size) for size in (64, 64, 32)]


def options_in(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return the options that the two lines of a recipe pass."""
    recorder = SimpleNamespace(enable=lambda model, **options: options, compile=lambda model, backend, options: options)
    names = {"streamfx": recorder, "torch": recorder, "model": None}
    enabled, compiled = (eval(recipe[key], names) for key in ("enable", "compile"))
    assert enabled == compiled == recipe["options"]
    return dict(enabled)


@pytest.mark.long
@pytest.mark.parametrize("given", [{"memory": "12MiB"}, {"memory": "24MiB", "max_length": True}], ids=str)
def test_the_recipe_of_a_plan_gives_the_planned_step(given: dict[str, Any]) -> None:
    """Also if the memory has to hold the state of an optimizer."""
    summary = streamfx.plan(TINY, seq=2048, optimizer="adamw8bit", baselines=False, **given).summary()
    same = streamfx.plan(TINY, seq=summary["length"], baselines=False, optimizer="adamw8bit", **options_in(summary["recipe"]))
    kept = ("peak_bytes", "flops", "stages")
    assert [same.summary()[key] for key in kept] == [summary[key] for key in kept]


def test_the_recipe_for_several_devices_has_sharding_and_launch() -> None:
    options = streamfx.Options(reshard=False, save="inputs").as_dict()
    recipe = recipe_of(options, Sharding(16, "zero2", 2))
    assert recipe["enable"] == 'streamfx.enable(model, save="inputs", reshard=False)'
    assert 'tp_plan="auto"' in recipe["shard"] and "reshard_after_forward=False" in recipe["shard"]
    assert "--nnodes 2 " in recipe["launch"] and recipe["launch"].endswith("--nproc-per-node 8 train.py")
    assert "--nproc-per-node 6 " in recipe_of(options, Sharding(12))["launch"]
    names = {"torch": torch, "model": nn.Linear(2, 2)}
    for optimizer, line in OPTIMIZERS.items():
        assert recipe_of(options, ALONE, optimizer=optimizer)["optimizer"] == f"optimizer = {line}"
        assert "bitsandbytes" in line or isinstance(eval(line, names), torch.optim.Optimizer)


def test_candidates_are_listed_once_and_the_chosen_one_is_marked() -> None:
    """Mixtures are omitted unless they are chosen."""

    def candidate(choice: str, peak: int, mixed: bool = False, chosen: bool = False) -> dict[str, Any]:
        return {"choice": choice, "peak_bytes": peak, "is_mixed": mixed, "chosen": chosen}

    simulated = [candidate("a", 9), candidate("a", 3), candidate("b", 5), candidate("a; b", 7, mixed=True)]
    chosen = candidate("b; a", 8, mixed=True, chosen=True)
    _, *rows = candidate_rows([*simulated, chosen, candidate("b; a", 6, mixed=True)])
    assert rows == [("a", "3 bytes", ""), ("b", "5 bytes", ""), ("b; a", "6 bytes", "8 bytes, this plan")]


@pytest.mark.long
def test_the_page_of_a_plan_within_a_budget() -> None:
    """It has the memory as given, the budget as a text, and the optimizer whose state it counts."""
    page = str(streamfx.plan(TINY, seq=2048, memory="12.5MB", optimizer="adamw8bit", baselines=False))
    assert re.match(r"\S+: fits into 12.5MB \(11.9 MiB\)\n", page) and page.count(", this plan\n") == 1
    assert re.search(r'write    streamfx.enable\(model, memory_budget="\d+\.\d+MiB"\)', page)
    assert re.search(r" optimizer = bitsandbytes.optim.AdamW8bit\(model.parameters\(\)\)  # \S+ KiB of state, which", page)
    assert "for what is not counted: the driver's context" in page


def test_predicted_flops_are_those_of_a_run() -> None:
    """By torch's counter, with a formula for the CPU's attention."""
    counted = pytest.importorskip("benchmarks.flop_formulas").counted
    auto = pytest.importorskip("transformers").AutoModelForCausalLM
    options: dict[str, Any] = {"chunk_size": 24, "loss_chunk_size": 16, "save": "products"}
    planned = streamfx.plan(TINY, seq=64, dtype="float32", baselines=False, options=options).summary()["flops_by_kind"]
    model = auto.from_config(configuration(TINY))
    ids = torch.randint(1, 500, (1, 64))
    loss = torch.compile(lambda: model(input_ids=ids, labels=ids, use_cache=False).loss, backend="streambp", options=options)
    loss().backward()  # compiles
    attention, linear = counted(lambda: loss().backward())
    assert planned["streambp"] == {"linear": linear, "attention": attention}


def test_reused_memory_counts_in_its_new_category() -> None:
    """The head's gradient is in the memory of the head's input; the peak is in the backward half of the last layer."""
    layers, seq = 4, 8192
    options = {"save": "inputs", "chunk_size": 64, "loss_chunk_size": 64, "keep_every": 1}
    report = streamfx.plan({**TINY, "num_hidden_layers": layers}, seq=seq, baselines=False, options=options)
    assert report.prediction.peak_by_term["stage inputs"] == (layers - 1) * seq * 64 * 2  # the first begins with ids


def test_inputs_of_a_custom_model_have_the_given_batch_and_length() -> None:
    """The first input need not have a batch, and inputs of other lengths need not exist."""

    class Placed(nn.Linear):
        def forward(self, positions: Any, x: Any) -> Any:  # type: ignore[override]
            return super().forward(x + positions[:, None]).square().mean()

    def inputs(batch: int, length: int) -> dict[str, Any]:
        if length < 64:
            raise ValueError("no less")
        return {"positions": torch.empty(length, device="meta"), "x": torch.empty(batch, length, 4, device="meta")}

    report = streamfx.plan(Placed(4, 4, device="meta"), seq=64, inputs=inputs, baselines=False)
    assert report.summary()["batch"] == 1 and "1 x 64 tokens" in str(report)


@pytest.mark.long
def test_a_sharded_plan_does_not_change_its_model() -> None:
    given: dict[str, Any] = {"world": 8, "tensor": 2, "context": 2, "shard": "zero3"}
    model: nn.Module = build_model(TINY)

    def seen() -> list[Any]:
        return [
            (name, type(module), sorted(module.__dict__), [(key, id(value)) for key, value in module._parameters.items()])
            for name, module in model.named_modules()
        ]

    before = seen()
    with first_layers(model, 1):
        assert len(seen()) < len(before)
    found = streamfx.plan(model, seq=64, baselines=False, **given).summary()
    assert {name: found[name] for name in given} == given
    assert seen() == before and not dist.is_initialized()
    assert all(parameter.is_meta and parameter.grad is None for parameter in model.parameters())


CONFIGURATIONS = named_cases("wrong configurations", globals())


@pytest.mark.parametrize("message", CONFIGURATIONS)
def test_wrong_configurations_are_refused(message: str, tmp_path: Path) -> None:
    """transformers keeps a misspelled key, and takes the default."""
    (tmp_path / "config.json").write_text(CONFIGURATIONS[message])
    with pytest.raises(streamfx.PlanError, match=message):
        build_model(tmp_path / "config.json")
