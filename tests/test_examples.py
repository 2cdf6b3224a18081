"""Examples and recipes run, stream, and end with the losses and weights of eager."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import streamfx
from tests.support.snippets import ran

pytestmark = pytest.mark.long

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples"
NEEDS = {**dict.fromkeys(("sft", "dpo_lora"), ("trl", "peft", "datasets")), **dict.fromkeys(("dpo", "grpo"), ("trl", "datasets"))}
NEEDS["lightning"] = ("lightning",)


def needs(name: str) -> None:
    for package in NEEDS.get(name, ()):
        pytest.importorskip(package)
    if name == "dpo_lora":
        from peft.import_utils import is_torchao_available

        try:
            is_torchao_available()
        except ImportError as error:
            pytest.skip(f"PEFT cannot create adapters here: {error}")


@pytest.mark.parametrize("name", ["custom_loss", "distillation", "dpo_lora", "grpo"])
def test_quick_examples_end_with_eagers_losses_and_weights(name: str) -> None:
    pytest.importorskip("rich")
    needs(name)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "STREAMFX_OPTIONS": '{"chunk_size": 32, "loss_chunk_size": 32}'}
    command = [sys.executable, "-W", "ignore", str(FOLDER / f"{name}.py"), "--quick", "--json"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    plain, streamed = json.loads(result.stdout.strip().splitlines()[-1])["rows"]
    assert streamed["method"] == "streambp"
    assert abs(streamed["value"] - plain["value"]) <= 1e-4 * max(1, abs(plain["value"]))
    assert streamed["weights_difference"] < 1e-5
    assert min(plain["peak_bytes"], streamed["peak_bytes"]) > 0


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "simple_fsdp", "tensor_parallel", "recurrent"])
def test_two_ranks_equal_one_process(name: str) -> None:
    """The script, started by torchrun, fails if weights differ."""
    script, environment = FOLDER / "distributed" / f"{name}.py", {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    assert "2 ranks and one process differ by" in done.stdout


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("custom_decoders/*.py") if path.stem != "running"))
def test_custom_decoders_stream_exactly(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(FOLDER / "custom_decoders"))
    decoder = importlib.import_module(name)
    model, inputs = decoder.example(48)
    monkeypatch.setattr(sys.modules["running"], "CHUNKS", {"chunk_size": 20, "loss_chunk_size": 13})
    decoder.show(model, *inputs, steps=1)
    shown = capsys.readouterr().out
    assert "every stage streams" in shown and "equal to eager" in shown
    exact = streamfx.verify(model.double(), *inputs, options={"chunk_size": 7, "loss_chunk_size": 13})
    assert exact.max_error < (1e-12 if name != "unbatched_rope" else 1e-6), exact  # that loss is in float32


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "recipes").glob("*.md")), ids=lambda page: page.stem)
def test_recipes_stream_and_are_short_and_linked(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs(page.stem)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    left = ran(page, tmp_path)
    texts = [str(left["found"])] if "found" in left else [compiled.text for compiled in left["enabled"].compiled]
    streams = ["every stage streams" in text for text in texts]
    assert any(streams), texts
    assert all(own or "unchunked, the graph takes" in text for own, text in zip(streams, texts, strict=True)), texts
    assert "checked" not in left or left["checked"].ok
    assert len(page.read_text().splitlines()) <= 60, "longer than a screen"
    assert f"](docs/recipes/{page.name})" in (ROOT / "README.md").read_text()
    assert re.search(rf": recipes/{page.name}$", (ROOT / "docs/site/mkdocs.yml").read_text(), re.MULTILINE)
