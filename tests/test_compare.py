"""`streamfx.compare`: each way computes the same, the table says what was gained, and an error says what to do."""

import dataclasses
import json
import os
import pickle
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import streamfx
from streamfx.errors import NotComparableError
from streamfx.kernels import accumulate
from streamfx.tools.cli import main
from streamfx.tools.inspect import measured_steps
from streamfx.tools.inspect.measured_steps import CHECKPOINTING, EAGER, STREAMBP, WAYS, Job
from streamfx.tools.inspect.torch_settings import TorchSettings
from streamfx.tools.report.comparison import Comparison, MeasuredWay, measured_way
from tests.support.small import VOCABULARY, WIDTH, Causal, tokens

ROOT = Path(__file__).parents[1]
IDS = tokens(2, 12)


class Layer(nn.Linear):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Layer.calls += 1
        return x + super().forward(x).tanh()


class Layered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Layer(WIDTH, WIDTH) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def mean_square(logits: Tensor) -> Tensor:
    return logits.square().mean()


def job(**changes: Any) -> Job:
    given: dict[str, Any] = {
        "build": lambda: (Layered().double(), (IDS,), {}),
        "loss": mean_square,
        "optimizer": None,
        "options": {"chunk_size": 4},
        "steps": 2,
    }
    return Job(**{**given, **changes}, settings=TorchSettings.current())


@pytest.mark.compiled
def test_ways_compute_the_same_and_a_wrong_one_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of each way, then a streambp that adds each chunk twice from its last step on; checkpointing runs each layer once
    more."""
    sgd = partial(torch.optim.SGD, lr=0.1)
    found, calls = {}, {}
    for way in WAYS:
        Layer.calls = 0
        found[way] = list(measured_steps.measured_steps(job(optimizer=sgd), way, tmp_path))
        calls[way] = Layer.calls
    assert [len(steps) for steps in found.values()] == [2, 2, 2]
    assert (calls[EAGER], calls[CHECKPOINTING]) == (4, 8)
    assert found[EAGER][0]["difference"] is None
    assert found[EAGER][1]["loss"] < found[EAGER][0]["loss"]  # the optimizer ran
    for way in (CHECKPOINTING, STREAMBP):
        assert found[way][0]["difference"] < 1e-12
        assert [step["loss"] for step in found[way]] == pytest.approx([step["loss"] for step in found[EAGER]], rel=1e-12)
    folder = tmp_path / "without an optimizer"
    folder.mkdir()
    assert len(list(measured_steps.measured_steps(job(), EAGER, folder))) == 2
    torch._dynamo.reset()
    streamed = measured_steps.measured_steps(job(), STREAMBP, folder)
    first = next(streamed)
    assert measured_way(STREAMBP, [first], "").is_equal
    monkeypatch.setattr(
        accumulate, "add_part", lambda total, part, is_first: (total.zero_() if is_first else total).add_(part, alpha=2)
    )
    torch._dynamo.reset()  # other code from here on, as compiled bodies are
    changed = measured_way(STREAMBP, [first, *streamed], "")
    assert changed.difference is not None and changed.difference > 1e-3 and not changed.is_equal


def test_random_numbers_and_models_without_layers_are_reported(tmp_path: Path) -> None:
    dropping = job(build=lambda: (nn.Dropout(0.5), (torch.ones(2, 8, requires_grad=True),), {}))
    assert next(measured_steps.measured_steps(dropping, EAGER, tmp_path))["is_random"]
    assert list(measured_steps.measured_steps(dropping, CHECKPOINTING, tmp_path)) == [{"missing": measured_steps.NO_LAYERS}]


def test_steps_have_the_settings_of_the_caller(tmp_path: Path) -> None:
    seen: list[torch.dtype] = []

    def loss(output: Tensor) -> Tensor:
        seen.extend((output.dtype, torch.empty(0).dtype))
        return output.sum()

    try:
        torch.set_default_dtype(torch.float64)
        with torch.autocast("cpu", torch.bfloat16):
            given = pickle.loads(pickle.dumps(TorchSettings.current()))
    finally:
        torch.set_default_dtype(torch.float32)
    run = job(
        build=lambda: (nn.Linear(4, 4, dtype=torch.float32), (torch.ones(2, 4, dtype=torch.float32),), {}), loss=loss, steps=1
    )
    try:
        list(measured_steps.measured_steps(dataclasses.replace(run, settings=given), EAGER, tmp_path))
    finally:
        torch.set_default_dtype(torch.float32)
    assert seen == [torch.bfloat16, torch.float64]


def test_a_process_ends_if_its_caller_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    readable, writable = os.pipe()
    waiting = threading.Thread(target=measured_steps.end_with_caller, args=(writable, str(tmp_path)))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    os.close(readable)
    waiting.join(60)
    os.close(writable)
    assert codes == [1] and not tmp_path.exists()


def test_the_table_has_ratios_to_checkpointing_or_to_eager() -> None:
    eager = MeasuredWay("eager", loss=2.0, peak_bytes=4 << 20, step_seconds=1.0)
    checkpointing = MeasuredWay("gradient checkpointing", loss=2.0, difference=0.0, peak_bytes=2 << 20, step_seconds=1.5)
    streamed = MeasuredWay("streambp", loss=2.0, difference=1e-7, peak_bytes=1 << 20, step_seconds=1.5)
    text = str(Comparison([eager, checkpointing, streamed], 2))
    assert "4.0 MiB (2.00)" in text and "1.0 MiB (0.50)" in text and "✓ 1.0e-07" in text
    assert (
        text.splitlines()[-1]
        == "streambp: 1.0 MiB where gradient checkpointing takes 2.0 MiB (0.50 times), in 1.00 times its time"
    )
    without = Comparison([eager, MeasuredWay("gradient checkpointing", "out of memory"), streamed], 2)
    assert without.ok and "gradient checkpointing: out of memory" in str(without) and "where eager takes 4.0 MiB" in str(without)
    alone = Comparison([MeasuredWay(way, "out of memory") for way in WAYS[:2]] + [streamed], 2)
    assert alone.ok and "1.0 MiB" in str(alone) and "where" not in str(alone)
    wrong = Comparison([eager, checkpointing, MeasuredWay("streambp", difference=0.5, is_equal=False)], 2)
    assert not wrong.ok and "✗ 5.0e-01" in str(wrong)
    assert not Comparison([eager, MeasuredWay("streambp", "out of memory")], 2).ok
    assert json.loads(json.dumps(wrong.summary()))["ways"][2]["difference"] == 0.5


def test_the_table_says_when_compiled_bodies_took_over() -> None:
    """Times are those of the steps with the last code; the second change is to code of other lengths."""
    changes, seconds = (0, 0, 1, 2, 2), (9.0, 4.0, 5.0, 2.0, 3.0)
    steps = [
        {"changes": change, "seconds": time, "loss": 1.0, "difference": None, "is_random": False, "peak_bytes": 1}
        for change, time in zip(changes, seconds, strict=True)
    ]
    ways = [measured_way(way, steps[:2] if way == CHECKPOINTING else steps, "") for way in WAYS]
    assert [(way.compiled_from, way.step_seconds, way.eager_seconds) for way in ways[1:]] == [(None, 4.0, 0.0), (4, 2.5, 4.5)]
    text = "streambp: compiled loop bodies run from step 4 on, which streambp's time refers to; a step before took 4.5 s"
    assert text in str(Comparison(ways, 5))
    assert "compiled" not in str(Comparison(ways[:2], 2))


def defined_in_a_notebook(monkeypatch: pytest.MonkeyPatch, file: str | None = None) -> type:
    """Return a class that pickle finds in a `__main__` without a file, or with a file that does not exist."""
    notebook = ModuleType("__main__")
    if file is not None:
        notebook.__file__ = file
    notebook.Own = type("Own", (nn.Linear,), {"__module__": "__main__"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    return notebook.Own


def test_what_no_process_can_get_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(nn.Linear):
        pass

    x = torch.ones(2, 4)
    for call, message in (
        (lambda: streamfx.compare(Own(4, 4), x), r"must be picklable(?s:.*)define its class in a module"),
        (lambda: streamfx.compare(nn.Linear(4, 4), x, loss=lambda y: y.sum()), "must be picklable"),
        (lambda: streamfx.compare(mean_square, x), "missing a required argument: 'logits'"),  # type: ignore[arg-type]
        (lambda: streamfx.compare(nn.Linear(4, 4), x, steps=0), "steps must be 1 or more"),
        (lambda: streamfx.compare(defined_in_a_notebook(monkeypatch)(4, 4), x), "interactive session or notebook"),
        (lambda: streamfx.compare(defined_in_a_notebook(monkeypatch, "<stdin>")(4, 4), x), "interactive session or notebook"),
    ):
        with pytest.raises(NotComparableError, match=message):
            call()
    with pytest.raises(streamfx.OptionError, match="did you mean 'chunk_size'"):
        streamfx.compare(Causal(), IDS, IDS, chunksize=4)
    monkeypatch.setattr(measured_steps, "is_measuring", True)
    with pytest.raises(NotComparableError, match="__main__"):
        streamfx.compare(nn.Linear(4, 4), x)


# -- in processes

SCRIPT = """
import torch, streamfx
F = torch.nn.functional
class Inner(torch.nn.Linear):
    def forward(self, x):  # reads a global, in a function that Dynamo inlines
        return F.silu(super().forward(x))
class Own(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Inner(8, 8)])
    def forward(self, x):
        return self.layers[0](x).square().mean()
def kill(y):
    import os, signal
    os.kill(os.getpid(), signal.SIGKILL)
"""
GUARDED = """
if __name__ == "__main__":
    print(streamfx.compare({}, steps=1, chunk_size=16).summary()["ways"])
"""
CALLS = {
    "Own(), torch.ones(1, 64, 8)": "'difference': 0.0",
    "Own, torch.ones(1, 64, 8), loss=kill": "[{'name': 'eager', 'missing': 'out of memory'",
    "Own(), torch.ones(1, 64, 9)": "RuntimeError: mat1 and mat2 shapes cannot be multiplied",
}


def ran(folder: Path, code: str) -> str:
    (folder / "script.py").write_text(SCRIPT + code)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "script.py"], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.compiled
@pytest.mark.parametrize("call", CALLS)
def test_a_script_compares_its_own_model(call: str, tmp_path: Path) -> None:
    assert CALLS[call] in ran(tmp_path, GUARDED.format(call))


def test_a_script_of_a_package_imports_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `python -m some_package.script` does."""
    folder = tmp_path / "some_package"
    folder.mkdir()
    (folder / "parts.py").write_text("width = 8\n")
    (folder / "script.py").write_text("from .parts import width\n\ndouble_width = 2 * width\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "__main__", main := ModuleType("__main__"))
    monkeypatch.setitem(sys.modules, measured_steps.IMPORTED, main)  # restored after the test
    measured_steps.import_script(str(folder / "script.py"), "some_package")
    assert main.double_width == 16


@pytest.mark.long
@pytest.mark.compiled
def test_a_script_without_a_guard_is_told_to_have_one(tmp_path: Path) -> None:
    assert "under `if __name__ == '__main__':`" in ran(tmp_path, "streamfx.compare(Own(), torch.ones(1, 64, 8))\n")


@pytest.mark.long
@pytest.mark.compiled
def test_the_command_prints_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 128, **sizes}))
    assert main(["compare", str(tmp_path), "--seq", "64", "--steps", "1", "--options", '{"chunk_size": 16}', "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [way["missing"] for way in found["ways"]] == ["", "", ""]
    assert all(way["peak_bytes"] > 0 for way in found["ways"])
