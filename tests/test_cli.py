"""The commands: their output, their exit codes, and the names of models."""

import json
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import streamfx
from streamfx.tools.cli import main
from streamfx.tools.planner import devices, model_names, models, objectives, quantized, shards
from streamfx.tools.planner.model_names import config_file
from tests.support.spread import only
from tests.support.tables import listed_cases, read

pytestmark = pytest.mark.compiled

pytest.importorskip("transformers")

SUPPORT = Path(__file__).parent / "support"
MINE = "factories_of_a_user:"
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64}
LLAMA = {"model_type": "llama", "max_position_embeddings": 128, **SIZES}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hugging Face folder, and a module of factories in the working directory."""
    of_folders = {
        "": LLAMA,
        "odd": {**LLAMA, "num_attention_heads": 5},
        "vast": {**LLAMA, "vocab_size": 10**15},  # larger than any address space
    }
    for name, content in of_folders.items():
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "config.json").write_text(json.dumps(content))
    shutil.copy(SUPPORT / "factories.txt", tmp_path / "factories_of_a_user.py")
    (tmp_path / "broken_module_of_a_user.py").write_text("def f(:")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_explain_prints_a_report_or_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(folder), "--seq", "0.0625K", "--options", '{"chunk_size": 16}', "--strict"]) == 0
    assert "every stage streams" in capsys.readouterr().out
    for factory, length in (("made", 32), ("decoder", 40)):  # a custom decoder gets ids and labels
        assert main(["explain", MINE + factory, "--seq", "40", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["graphs"], found["sequence"]) == (1, [length])


def test_verify_prints_a_result_or_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(folder), "--seq", "32", "--dtype", "float64", "--options", '{"chunk_size": 8}', "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and found["max_error"] < 1e-12
    assert main(["verify", MINE + "by_name"]) == 0
    assert "equal to eager" in capsys.readouterr().out


@pytest.mark.parametrize("factory", only(["own_table"], ["compiled", "bound", "gathering", "own_table"]))
def test_ids_are_passed_to_the_argument_that_is_looked_up(factory: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also through wrappers; ids are smaller than each table that they index."""
    assert main(["verify", MINE + factory, "--seq", "40", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and found["loss"] != 0


@pytest.mark.long
@pytest.mark.parametrize("into", ["> /dev/full", "| head -c 1"])
def test_a_closed_or_full_output_causes_no_traceback(into: str) -> None:
    """A full device is refused; a reader that closes the pipe is not an error."""
    command = f"{sys.executable} -m streamfx doctor --json {into}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    if into == "| head -c 1":
        assert (done.stdout, done.stderr) == ("{", "")
    else:
        assert done.returncode == 1 and "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
        assert done.stderr.startswith("the answer is to be written to standard output")


def test_doctor_runs_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["entry_point"] == "found"
    assert found["self_test"]["ok"] and found["self_test"]["max_error"] < 1e-12


def test_version_help_and_usage(capsys: pytest.CaptureFixture[str]) -> None:
    """A bare command prints its help; a wrong number of tokens is wrong usage."""
    assert main([]) == 2
    assert "explain" in capsys.readouterr().err
    for command, code, said in (
        ("--version", 0, f"streamfx {streamfx.__version__}"),
        ("plan Qwen3-8B --seq 12x", 2, "'12x' is no number of tokens"),
        ("explain Qwen3-8B --seq 1.0001K", 2, "'1.0001K' is no number of tokens"),
        ("plan Qwen3-8B --chunk-size 1KB", 2, "'1KB' is no number of tokens"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(command.split())
        shown = capsys.readouterr()
        assert ended.value.code == code and said in shown.out + shown.err


def interrupted(*_: object) -> Any:
    raise KeyboardInterrupt


BROKEN = metadata.EntryPoint("streambp", "no_such_module:streambp", "torch_dynamo_backends")
SELF_TEST = "streamfx.tools.cli.doctor.self_test"
OK: dict[str, Any] = {"ok": True, "max_error": 0.0, "seconds": 0.0}
FOUND: list[tuple[dict[str, Any], int, str]] = listed_cases("faults for doctor", globals())


@pytest.mark.parametrize(("replaced", "code", "said"), FOUND, ids=[said for _, _, said in FOUND])
def test_doctor_reports_faults(
    replaced: dict[str, Any], code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {SELF_TEST: lambda: OK, **replaced}.items():
        monkeypatch.setattr(name, value)
    assert main(["doctor"]) == code
    shown = capsys.readouterr()
    assert said in shown.out + shown.err and "Traceback" not in shown.err


REFUSALS = read(SUPPORT / "refusals.txt", 2)[""]


@pytest.mark.parametrize(("command", "message"), REFUSALS)
def test_refusals(folder: Path, command: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command.split()) == 1
    shown = capsys.readouterr()
    assert message in shown.err and not shown.out
    assert "Traceback" not in shown.err


@pytest.mark.long
def test_unreadable_weights_are_refused_unless_layers_are_given(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "model.safetensors").write_text("no weights")
    assert main(["verify", str(folder), "--seq", "16"]) == 1
    assert "cannot be loaded" in capsys.readouterr().err
    assert main(["verify", str(folder), "--seq", "16", "--layers", "1"]) == 0


# -- names of models


def test_the_command_line_lists_the_names_of_all_tables() -> None:
    assert tuple(models.TYPES) == model_names.TYPES
    assert all(objectives.objective_by_name(name, 2) for name in model_names.OBJECTIVES)
    assert tuple(shards.STATES) == model_names.OPTIMIZERS
    assert tuple(quantized.SCHEMES) == model_names.SCHEMES
    assert tuple(devices.PUBLISHED) == model_names.DEVICES


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the hub's library with a downloaded model."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    main_, path = (tmp_path / "models--some-org--some-model" / name for name in ("refs/main", "snapshots/abc/config.json"))
    for file, text in ((main_, "abc"), (path, json.dumps(LLAMA))):
        file.parent.mkdir(parents=True)
        file.write_text(text)
    return path


def test_a_configuration_has_many_names(cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = model_names.FOLDER / "Qwen3-8B.json"
    assert config_file("Qwen3-8B") == config_file("qwen3-8b") == config_file("Qwen/Qwen3-8B") == config_file(shipped) == shipped
    assert config_file("some-org/some-model") == config_file(cached.parent) == cached
    newer = model_names.FOLDER / "Llama-3.3-70B.json"
    assert config_file("meta-llama/Meta-Llama-3.3-70B-Instruct") == config_file("llama-3.3-70b") == newer
    assert config_file("google/gemma-3-12b-it") == config_file("Gemma-3-12B-pt") == model_names.FOLDER / "Gemma-3-12B.json"
    monkeypatch.chdir(tmp_path)
    Path("Qwen").mkdir()
    assert config_file("Qwen/Qwen3-8B") == shipped
    Path("Qwen/Qwen3-8B").mkdir()
    with pytest.raises(streamfx.PlanError, match=r"has no config\.json"):
        config_file("Qwen/Qwen3-8B")
    Path("Qwen/Qwen3-8B/config.json").write_text("{}")
    assert config_file("Qwen/Qwen3-8B") == Path("Qwen/Qwen3-8B/config.json")


def test_a_cached_model_is_planned(cached: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "some-org/some-model", "--seq", "64", "--no-baselines", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "some-model"
