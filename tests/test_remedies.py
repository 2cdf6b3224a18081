"""A refused plan names the smallest change with which it fits, as a command."""

import inspect
import json
import pickle
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import streamfx
from streamfx.budget import parse_amount
from streamfx.cost.work import NO_WORK
from streamfx.errors import OverBudgetError
from streamfx.ir.facts import known
from streamfx.tools.cli import main, parser
from streamfx.tools.planner.command import command_of
from streamfx.tools.planner.model_names import BACKEND_OPTIONS, PLAN_ARGUMENTS
from streamfx.tools.planner.predict import Prediction
from streamfx.tools.planner.remedies import Planner, advice
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


def remedy(limit: int, host: int | None = None, without_fit: bool = False, **given: Any) -> tuple[str, ...]:
    """Return the parts of the remedy of a step that takes more than the limit: words, what it takes, command."""
    request = request_with(memory=limit, **given)
    refusal = OverBudgetError("too much", do="give more")
    refusal.terms = terms_of(request)
    refusal.smallest = sum(refusal.terms.values())
    refusal.on_host = predict_least(request, None).host_bytes
    assert refusal.smallest > limit or host is not None

    def limits(changed: SimpleNamespace) -> Limits:
        return Limits(1 if without_fit else known(parse_amount(changed.memory)), host)  # type: ignore[arg-type]

    text = advice(refusal, request, Planner(limits, lambda _: NotImplemented, predict_least), DEFAULTS)
    return tuple(re.split(r"; |\n *", text))


ON_HOST, SHARED = "inputs of layers on the host", "that share parameters, gradients and optimizer state (zero3)"
CHANGES: list[tuple[dict[str, Any], int, str, str]] = [
    ({}, 9600, "--seq 1000 --memory 9600 --offload inputs", ON_HOST),
    ({"optimizer": "adamw"}, 16_700, "--seq 1000 --memory 16700 --optimizer adamw8bit", "adamw8bit instead of adamw"),
    (
        {"optimizer": "adamw"},
        13_700,
        "--seq 1000 --memory 13700 --optimizer adamw8bit --offload inputs",
        f"adamw8bit instead of adamw, {ON_HOST}",
    ),
    ({"options": {"save": "products"}}, 12_500, "--seq 1000 --memory 12500", "without --save"),
    ({"lora_rank": 8}, 5800, "--seq 1000 --memory 5800 --lora-rank 8 --offload inputs", ON_HOST),
    (
        {"lora_rank": 8, "options": {"offload": "inputs"}},
        2800,
        "--seq 1000 --memory 2800 --lora-rank 8 --quantize nf4 --offload inputs",
        "nf4 weights",
    ),
    (
        {"options": {"offload": "inputs"}},
        9300,
        "--seq 742 --memory 9300 --offload inputs",
        "742 tokens instead of 1,000 on one device",
    ),
    (
        {},
        4000,
        "--seq 1000 --memory 4000 --world 4 --shard zero3 --offload inputs",
        f"4 devices instead of 1 {SHARED}, {ON_HOST}",
    ),
    (
        {"world": 8, "shard": "ddp"},
        4000,
        "--seq 1000 --memory 4000 --world 8 --shard zero3 --offload inputs",
        f"8 devices {SHARED}, {ON_HOST}",
    ),
    (
        {"world": 64, "shard": "zero3"},
        1000,
        "--seq 356 --memory 1000 --world 64 --shard zero3 --offload inputs",
        f"356 tokens instead of 1,000 on 64 devices, {ON_HOST}",
    ),
    (
        {},
        1000,
        "--seq 356 --memory 1000 --world 64 --shard zero3 --offload inputs",
        f"356 tokens instead of 1,000, 64 devices instead of 1 {SHARED}, {ON_HOST}",
    ),
]


@pytest.mark.parametrize(("given", "limit", "command", "words"), CHANGES, ids=lambda value: str(value)[:60])
def test_the_smallest_change_is_named(given: dict[str, Any], limit: int, command: str, words: str) -> None:
    assert remedy(limit, **given)[0::2] == (f"this fits: {words}", f"streamfx plan some-model {command}")


def test_with_more_devices_the_longest_sequence_on_the_requested_ones_is_named_too() -> None:
    """Here, there is no room on the host."""
    more, _, command, shorter, _, other = remedy(9600, host=100)
    assert more == f"this fits: 2 devices instead of 1 {SHARED}" and command.endswith(
        " --seq 1000 --memory 9600 --world 2 --shard zero3"
    )
    assert shorter == "this fits: 227 tokens instead of 1,000 on one device" and other.endswith(" --seq 227 --memory 9600")


def test_a_shorter_sequence_fits_onto_the_host() -> None:
    words, _, command = remedy(9600, host=100, options={"offload": "inputs"})
    assert words == "this fits: 32 tokens instead of 1,000 on one device" and " --seq 32 " in command


def test_if_no_change_fits_the_least_memory_is_named() -> None:
    """A step of nothing but constants fits on no device."""
    found, words, _, command = remedy(510)
    assert found == "no change was found that fits into this memory"
    assert words == f"with more of it, this fits: 10KiB of memory, {ON_HOST}" and " --memory 10KiB " in command
    assert remedy(510, without_fit=True) == ("give more",)


def test_the_search_for_a_change_starts_when_the_text_is_read() -> None:
    calls: list[int] = []
    refusal = OverBudgetError("too much", "a little", do="give more")

    def advise() -> str:
        calls.append(1)
        return "this fits: less\n  a command"

    refusal.advise = advise
    assert refusal.do == "give more" and not calls
    copied = pickle.loads(pickle.dumps(refusal))
    for error in (refusal, copied, refusal):
        assert str(error) == "too much\n  found a little\n  do    this fits: less\n          a command"
    assert calls == [1]


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
