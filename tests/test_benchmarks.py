"""Benchmarks: every way computes the same, ratios compare neighbours in time, and figures become tables and charts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.gpu.models import TINY
from benchmarks.settings import Settings
from benchmarks.training import Training
from benchmarks.turns import Outcome, in_turns
from benchmarks.ways import WAYS
from tests.support.spread import only

HEAD: dict[str, Any] = {"workload": "head", "length": 24, "sizes": {"width": 8, "vocabulary": 40}}
MLP: dict[str, Any] = {"workload": "mlp", "length": 24, "sizes": {"width": 8, "inner": 16, "parts": 3}}
DECODER: dict[str, Any] = {"workload": "decoder", "length": 24, "sizes": {**TINY, "num_hidden_layers": 2}}
TRL: dict[str, Any] = {**DECODER, "workload": "TRL"}


OURS = ("checkpointing", "streambp, eager bodies")
SPECS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "head": (HEAD, ("checkpointing, loss in parts",)),
    "mlp": (MLP, ("checkpointing", "mini-sequences")),
    "decoder": (DECODER, ("checkpointing", "checkpointing, reentrant", "checkpointing, loss in parts")),
    "TRL's DPO": ({**TRL, "feed": "dpo"}, OURS),
    "TRL's GRPO": ({**TRL, "feed": "grpo"}, OURS),
    "DPO": ({**DECODER, "workload": "preferences", "feed": "dpo"}, OURS),
    "GRPO": ({**DECODER, "workload": "preferences", "feed": "grpo"}, OURS),
}


@pytest.mark.parametrize("name", only(["head", "mlp"], SPECS))
def test_every_way_computes_the_same(name: str) -> None:
    spec, ways = SPECS[name]
    expected = Training("eager", **spec).step()
    for way in ways:
        assert (training := Training(way, **spec)).step() == pytest.approx(expected, rel=1e-5), way
        assert all(weight.grad is None for weight in training.work.module.parameters())


def test_what_cannot_run_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    found = in_turns({"ours": {"way": "checkpointing, CCE", "length": 8}}, 1, Settings())
    assert found["ours"].why_not == "cut_cross_entropy has CUDA kernels only"
    assert all(way.why_not("cpu") == "" for way in WAYS.values() if not way.package)
    with pytest.raises(SystemExit):
        main(["step", "--way", "eagre"])
    assert "no way is called 'eagre'" in capsys.readouterr().err


def test_ratios_compare_what_ran_in_the_same_round() -> None:
    one, other = Outcome(later=[{"s": 1.0}, {"s": 10.0}, {"s": 2.0}]), Outcome(later=[{"s": 2.0}, {"s": 20.0}, {"s": 2.0}])
    assert one.over(other, "s") == 0.5


def test_figures_are_printed_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    rows = [{"way": "eager", "T": 8, "peak MiB": 2.0, "processor s": 1.0}, {"way": "inductor", "T": 8, "why not": "no compiler"}]
    figures, chart = tmp_path / "figures.json", tmp_path / "chart.svg"
    figures.write_text(json.dumps({"machine": "a machine", "step": rows}))
    main(["--figures", str(figures), "--chart", str(chart)])
    assert "| eager | 8 | 2 | 1 |  |" in capsys.readouterr().out
    assert "<svg" in chart.read_text()
