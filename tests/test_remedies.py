"""A refused plan names the smallest change with which it fits, as a command."""

import inspect
import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import streamfx
from streamfx.cost.work import NO_WORK
from streamfx.errors import OverBudgetError
from streamfx.tools.cli import main, parser
from streamfx.tools.planner.command import command_of
from streamfx.tools.planner.model_names import BACKEND_OPTIONS, PLAN_ARGUMENTS
from streamfx.tools.planner.predict import Prediction
from streamfx.tools.planner.remedies import Planner, with_remedy
from streamfx.tools.planner.search import Limits
from tests.test_plan import TINY

pytest.importorskip("transformers")

DEFAULTS = {name: parameter.default for name, parameter in inspect.signature(streamfx.plan).parameters.items()}
STATES = {"none": 0, "adamw8bit": 4100, "adamw": 8000}


def request_with(**given: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**DEFAULTS, "model": "some-model", "seq": 1000, "options": {}, **given})


def terms_of(request: SimpleNamespace) -> dict[str, int]:
    """Return the bytes of a step whose weights and gradients are 4,000 each, with 4 bytes per token."""
    shards = request.world if request.shard == "zero3" else 1
    is_offloaded, is_rich = request.options.get("offload") == "inputs", request.options.get("save") == "products"
    return {
        "parameters": (1200 if request.quantize else 4000) // shards,
        "gradients": (10 if request.lora_rank else 4000) // shards,
        "optimizer": STATES[request.optimizer] // shards,
        "stage inputs": 0 if is_offloaded else 3 * request.seq,
        "chunk work": 500 + request.seq * (10 if is_rich else 1),
    }


def predict_least(request: SimpleNamespace, rows: int | None) -> Prediction:
    if request.seq < 16:
        raise streamfx.PlanError("too short")
    terms = terms_of(request)
    host = 3 * request.seq if request.options.get("offload") == "inputs" else 0
    return Prediction(request.seq, request.batch, sum(terms.values()), terms, NO_WORK, host_bytes=host)


def remedy(limit: int, host: int | None = None, **given: Any) -> str:
    """Return the remedy of a step that takes more than the limit."""
    request = request_with(memory=limit, **given)
    refusal = OverBudgetError("too much", do="give more")
    refusal.terms = terms_of(request)
    refusal.smallest = sum(refusal.terms.values())
    assert refusal.smallest > limit
    planner = Planner(lambda request: Limits(limit, host), predict_least, predict_least)  # type: ignore[arg-type]
    return with_remedy(refusal, request, planner, DEFAULTS).do


CHANGES: list[tuple[dict[str, Any], int, str]] = [
    ({}, 9600, "--seq 1000 --memory 9600 --offload inputs"),
    ({"optimizer": "adamw"}, 16_700, "--seq 1000 --memory 16700 --optimizer adamw8bit"),
    ({"optimizer": "adamw"}, 13_700, "--seq 1000 --memory 13700 --optimizer adamw8bit --offload inputs"),
    ({"options": {"save": "products"}}, 12_500, "--seq 1000 --memory 12500"),
    ({"lora_rank": 8}, 5800, "--seq 1000 --memory 5800 --lora-rank 8 --offload inputs"),
    (
        {"lora_rank": 8, "options": {"offload": "inputs"}},
        2800,
        "--seq 1000 --memory 2800 --lora-rank 8 --quantize nf4 --offload inputs",
    ),
    ({"options": {"offload": "inputs"}}, 9300, "--seq 768 --memory 9300 --offload inputs"),
    ({}, 4000, "--seq 1000 --memory 4000 --world 4 --shard zero3 --offload inputs"),
    ({"world": 8, "shard": "ddp"}, 4000, "--seq 1000 --memory 4000 --world 8 --shard zero3 --offload inputs"),
    ({"world": 64, "shard": "zero3"}, 1000, "--seq 366 --memory 1000 --world 64 --shard zero3 --offload inputs"),
    ({}, 1000, "--seq 366 --memory 1000 --world 64 --shard zero3 --offload inputs"),
]


@pytest.mark.parametrize(("given", "limit", "command"), CHANGES, ids=lambda value: str(value)[:60])
def test_the_smallest_change_is_named(given: dict[str, Any], limit: int, command: str) -> None:
    do = remedy(limit, **given)
    assert do.startswith("run this, which fits (1 x ")
    assert do.endswith(f": streamfx plan some-model {command}")


def test_a_change_needs_host_memory_and_a_fit() -> None:
    """Without room on the host, the sequence is shorter instead; a step of nothing but constants fits on no device."""
    assert remedy(9600, host=100).endswith(" --seq 1000 --memory 9600 --world 2 --shard zero3")
    assert remedy(510) == "give more"


def test_a_command_parses_to_its_request() -> None:
    given = {
        "memory": "24GB",
        "lora_rank": 8,
        "max_batch": True,
        "optimizer": "adamw",
        "world": 2,
        "shard": "zero2",
        "seq": 131072,
    }
    options = {"chunk_size": 2048, "offload": "attention", "keep_every": 3, "save": "auto"}
    command = command_of(vars(request_with(model="my model/", options=options, baselines=False, **given)), DEFAULTS)
    assert "--seq 128K " in command and "--chunk-size 2K" in command
    parsed = vars(parser().parse_args(shlex.split(command)[1:]))
    wanted = {**{name: DEFAULTS[name] for name in PLAN_ARGUMENTS}, **given, "model": "my model/"}
    wanted["offload"] = [options.pop("offload")]
    assert {name: parsed[name] for name in wanted} == wanted and parsed["no_baselines"]
    assert {name: parsed[name] for name in BACKEND_OPTIONS if name != "offload"} == {
        **options,
        "loss_chunk_size": None,
        "save": None,
    }
    call = command_of(vars(request_with(model=TINY, options={"accumulate": "same"})), DEFAULTS)
    assert call == "streamfx.plan(model, seq=1000, accumulate='same')"


REFUSED = (
    "--seq 2K --memory 2M",
    "--seq 2K --memory 2500K --optimizer adamw",
    "--seq 4K --memory 3M --lora-rank 8",
    "--seq 2K --memory 5M --save products --chunk-size 1K",
    "--seq 2K --memory 1800K --world 2 --shard zero2",
)


@pytest.mark.long
@pytest.mark.compiled
@pytest.mark.parametrize("given", REFUSED)
def test_each_refusal_ends_in_a_command_that_fits(given: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    assert main(["plan", str(tmp_path), *given.split(), "--no-baselines"]) == 1
    command = re.search(r"streamfx (plan .*)$", capsys.readouterr().err, re.M)
    assert command is not None
    assert main([*shlex.split(command[1]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"]
