"""Each example in its short form: both ways end with the same losses and weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

pytest.importorskip("transformers")
pytest.importorskip("rich")

FOLDER = Path(__file__).parents[1] / "examples"
NEEDS = {"custom_loss": (), "distillation": (), "dpo_lora": ("trl", "peft", "datasets"), "grpo": ("trl", "datasets")}


@pytest.mark.parametrize("name", NEEDS)
def test_quick(name: str) -> None:
    for package in NEEDS[name]:
        pytest.importorskip(package)
    if name == "dpo_lora":
        try_peft()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "STREAMFX_OPTIONS": '{"chunk_size": 32, "loss_chunk_size": 32}'}
    command = [sys.executable, "-W", "ignore", str(FOLDER / f"{name}.py"), "--quick", "--json"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    plain, streamed = json.loads(result.stdout.strip().splitlines()[-1])["rows"]
    assert streamed["method"] == "streambp"
    assert abs(streamed["value"] - plain["value"]) <= 1e-4 * max(1, abs(plain["value"]))
    assert streamed["weights_difference"] < 1e-5
    assert min(plain["peak_bytes"], streamed["peak_bytes"]) > 0


def try_peft() -> None:
    from peft.import_utils import is_torchao_available

    try:
        is_torchao_available()
    except ImportError as error:
        pytest.skip(f"PEFT makes no adapters here: {error}")


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "simple_fsdp", "tensor_parallel", "recurrent"])
def test_two_ranks_are_one_process(name: str) -> None:
    """As torchrun starts them; the script fails where weights differ."""
    script, environment = FOLDER / "distributed" / f"{name}.py", {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    assert "2 ranks and one process differ by" in done.stdout
