"""The commands `explain`, `verify` and `doctor`: what they print, and their exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from streamfx.tools.cli import main

pytest.importorskip("transformers")

FACTORY = """
import functools

import torch
from torch import nn


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 8)

    def forward(self, x):
        return self.head(x).square().mean()


class Sorted(Mean):
    def forward(self, x):
        return self.head(torch.sort(x, dim=1).values).square().mean()


def made():
    return Mean(), (torch.randn(2, 32, 8),)


def by_name():
    return Mean(), {"x": torch.randn(2, 32, 8)}


def alone():
    return Mean()


class Decoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.short, self.head = torch.nn.Embedding(50, 8), torch.nn.Embedding(4, 8), torch.nn.Linear(8, 50)

    def forward(self, tokens, targets=None):
        logits = self.head(self.embed(tokens) + self.short(tokens))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Masked(Decoder):
    def forward(self, tokens, mask):
        return super().forward(tokens, tokens)


def decoder():
    return Decoder()


def masked():
    return Masked()


def nothing():
    return None


class Wrong(Mean):
    def forward(self, x):
        raise KeyError("in forward")


def wrong():
    return Wrong(), (torch.randn(2, 32, 8),)


def shapes():
    return Mean(), (torch.randn(2, 32, 9),)


def pair():
    return None, (torch.randn(2),)


def fails():
    raise RuntimeError("in the factory")


def compiled():
    return torch.compile(Decoder())


ready = Decoder()


def bound():
    return functools.partial(Decoder(), targets=torch.zeros(1, 40, dtype=torch.long))


class Gathering(Decoder):
    def forward(self, *args, **kwargs):
        return super().forward(*args, targets=args[0], **kwargs)


def gathering():
    return Gathering()


class MaskFirst(Decoder):
    def forward(self, attention_mask=None, input_ids=None, labels=None):
        assert attention_mask is None
        return super().forward(input_ids, labels)


def mask_first():
    return MaskFirst()


class OwnTable(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(7, 8))

    def forward(self, attention_mask=None, ids=None):
        return torch.nn.functional.embedding(ids.flatten(), self.table).square().mean() + self.table[ids].mean()


def own_table():
    return OwnTable()


class Two(Decoder):
    def forward(self, kinds=None, ids=None):
        kinds, ids = (ids if kinds is None else kinds), (kinds if ids is None else ids)
        return (self.embed(kinds) + self.short(ids)).mean()


def two():
    return Two()


CONSTANT = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hugging Face folder, and a module of factories in the working directory."""
    values = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    sizes = {"num_attention_heads": 4, "vocab_size": 64, "max_position_embeddings": 128}
    vast = {**values, **sizes, "vocab_size": 10**15}  # more than any host can even address
    (tmp_path / "config.json").write_text(json.dumps({**values, **sizes}))
    (tmp_path / "factories_of_a_user.py").write_text(FACTORY)
    (tmp_path / "broken_module_of_a_user.py").write_text("def f(:")
    for name, content in (
        ("encoder", {"model_type": "t5"}),
        ("odd", {**values, **sizes, "num_attention_heads": 5}),
        ("vast", vast),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(content))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_explain(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(folder), "--seq", "64", "--options", '{"chunk_size": 16}', "--strict"]) == 0
    assert "every stage streams" in capsys.readouterr().out
    assert main(["explain", "factories_of_a_user:made", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["graphs"] == 1


def test_verify(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(folder), "--seq", "32", "--dtype", "float64", "--options", '{"chunk_size": 8}', "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and found["max_error"] < 1e-12
    assert main(["verify", "factories_of_a_user:by_name"]) == 0
    assert "the same as eager" in capsys.readouterr().out


def test_a_decoder_of_ones_own_is_given_ids_and_labels(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of no table more than it has."""
    assert main(["verify", "factories_of_a_user:decoder", "--seq", "40"]) == 0
    assert "the same as eager" in capsys.readouterr().out
    assert main(["explain", "factories_of_a_user:decoder", "--seq", "40", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sequence"] == [40]


@pytest.mark.parametrize("factory", ["compiled", "ready", "bound", "gathering", "mask_first", "own_table"])
def test_ids_are_given_as_what_is_looked_up(factory: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever is around the model, and wherever its ids stand among its arguments."""
    assert main(["verify", f"factories_of_a_user:{factory}", "--seq", "40", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and found["loss"] != 0


def test_an_answer_that_cannot_be_written_is_a_refusal() -> None:
    command = f"{sys.executable} -m streamfx doctor --json > /dev/full"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("the answer is to be written to standard output") and "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_a_reader_that_has_seen_enough_sees_no_traceback() -> None:
    command = f"{sys.executable} -m streamfx doctor --json | head -c 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("{", "")


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["entry_point"] == "found"
    assert found["self_test"]["ok"] and found["self_test"]["max_error"] < 1e-12
    assert main(["doctor"]) == 0
    assert "streamfx works here" in capsys.readouterr().out


def test_doctor_names_libraries_that_are_too_old(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("streamfx.tools.cli.doctor._version", lambda name: "1.14.2" if name == "trl" else None)
    monkeypatch.setattr("streamfx.tools.cli.doctor.self_test", lambda: {"ok": True, "max_error": 0.0, "seconds": 0.0})
    assert main(["doctor"]) == 0
    assert "trl 1.14.2 (streamfx.enable needs 1.15)" in capsys.readouterr().out


def test_a_fault_has_an_exit_code_of_its_own(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("streamfx.tools.cli.doctor.self_test", lambda: {"ok": False, "error": "broken", "seconds": 0.0})
    assert main(["doctor"]) == 3
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "no/such/folder"], "there is no configuration"),
        (["explain", "factories_of_a_user:missing"], "there is no 'factories_of_a_user:missing'"),
        (["verify", "no_such_module:made"], "No module named"),
        (["verify", "factories_of_a_user:alone"], "x of ids is not what it takes"),
        (["verify", "factories_of_a_user:two"], "kinds and ids are both looked up in tables"),
        (["explain", "x" * 300], "there is no configuration"),
        (["explain", "x" * 300 + ":made"], "there is no "),
        (["explain", ".", "--html", "x" * 300], "a report is to be written to"),
        (["verify", "factories_of_a_user:masked"], "without arguments"),
        (["verify", "factories_of_a_user:masked"], "nobody tells what 'mask' is"),
        (["verify", "factories_of_a_user:nothing"], "a function that returns a model"),
        (["verify", "factories_of_a_user:pair"], "a tuple of NoneType, tuple"),
        (["verify", "factories_of_a_user:CONSTANT"], "found a int"),
        (["verify", "factories_of_a_user:fails"], "found RuntimeError: in the factory\n  where "),
        (["verify", "factories_of_a_user:wrong"], "in eager, without the backend, it raises KeyError: 'in forward'"),
        (["explain", "factories_of_a_user:wrong"], "found KeyError: 'in forward'"),
        (["verify", "factories_of_a_user:shapes"], "shapes cannot be multiplied"),
        (["explain", "factories_of_a_user:shapes"], "must have same reduction dim"),
        (["verify", "broken_module_of_a_user:made"], "found SyntaxError"),
        (["verify", ":made"], "there is no ':made'"),
        (["verify", "encoder"], "makes no causal language model"),
        (["explain", "odd"], "not a multiple of the number of attention heads"),
        (["plan", "encoder"], "makes no causal language model"),
        pytest.param(["verify", ".", "--options", '{"memory_budget": 3}'], "less than any plan", marks=pytest.mark.long),
        (["verify", ".", "--options", "[3]"], "must be a dictionary of options"),
        (["verify", ".", "--layers", "0"], "--layers is 1 or more"),
        (["verify", ".", "--layers", "2"], "found it has 1\n  do    give a number from 1 to 1"),
        (["explain", ".", "--layers", "2"], "--layers 2 asks for so many layers of a configuration"),
        (["explain", "factories_of_a_user:alone", "--layers", "2"], "--layers is for configurations of Hugging Face"),
        (["verify", "vast"], "238418579.1 GiB, and their gradients as much"),
        (["explain", ".", "--options", "{"], "--options must be JSON"),
        (["explain", ".", "--options", '{"chunks": 3}'], "did you mean"),
        (["explain", ".", "--seq", "1"], "--seq is 2 or more"),
    ],
)
def test_refusals(folder: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 1
    shown = capsys.readouterr()
    assert message in shown.err and not shown.out
    assert "Traceback" not in shown.err


def test_weights_that_cannot_be_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "model.safetensors").write_text("no weights")
    assert main(["verify", str(folder), "--seq", "16"]) == 1
    assert "cannot be loaded" in capsys.readouterr().err
    assert main(["verify", str(folder), "--seq", "16", "--layers", "1"]) == 0


def test_a_broken_entry_point_is_a_fault(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from importlib import metadata

    broken = metadata.EntryPoint("streambp", "no_such_module:streambp", "torch_dynamo_backends")
    monkeypatch.setattr(metadata, "entry_points", lambda **_: (broken,))
    assert main(["doctor"]) == 3
    assert "broken (no_such_module:streambp, ModuleNotFoundError" in capsys.readouterr().out


def test_wrong_usage() -> None:
    with pytest.raises(SystemExit) as error:
        main(["explain"])
    assert error.value.code == 2


def test_an_interrupt_is_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("streamfx.tools.cli.doctor.run", interrupted)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
