"""Model types of transformers, tiny: exact, and what is to stream does. A spread of families every time, all with --long."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from tests.support.spread import only
from tests.zoo.configs import LAYERS, distinct_layers, shrunk_value
from tests.zoo.measure import counted, measured
from tests.zoo.models import grouped_products_in_float64, model_types
from tests.zoo.report import text_of
from tests.zoo.runs import known, tidy

pytestmark = pytest.mark.long

# one of a kind each, cheap to trace; the attention that is to be found
SPREAD = {
    "bloom": {"causal"},  # slopes per head
    "cohere2": {"causal", "window(8)"},  # parallel blocks, sliding mixed with full
    "cpmant": {"masked"},  # learned relative bias
    "diffllama": {"causal"},  # differential
    "falcon": {"causal"},  # one key head, parallel
    "gemma2": {"causal", "window(8)"},  # softcap, sandwich norms
    "granite_swa": {"causal"},  # sinks by a sigmoid
    "llama4_text": {"causal"},  # chunked attention, experts over all rows
}
REST = [name for name in model_types() if name not in SPREAD]


@pytest.mark.parametrize("name", only(["cohere2", "llama4_text"], SPREAD))
def test_streams(name: str) -> None:
    grouped_products_in_float64()
    row = measured(name)
    assert row["status"] == "exact", row
    assert not row["failed"] and not row["reasons"], row["reasons"]
    assert row["share"] == 1
    assert SPREAD[name] <= set(row["attention"])


@pytest.mark.long
@pytest.mark.parametrize("name", REST)
def test_is_exact(name: str) -> None:
    grouped_products_in_float64()
    row = measured(name)
    if row["status"] in ("not built", "not traced"):
        pytest.skip(row["error"])
    assert row["status"] == "exact", row
    assert not row["failed"], row["failed"]


# -- the harness itself


def test_layers_that_show_every_kind() -> None:
    kinds = ["a", "a", "b", "a", "a", "c"]
    assert distinct_layers([kinds, ["x"] * 3 + ["y"] * 3], 6) == [0, 2, 3, 5]
    assert len(distinct_layers([["a"] * 6], 6)) == LAYERS


def test_sizes_shrink_and_never_grow() -> None:
    class Config:
        num_attention_heads = 32

    assert shrunk_value("hidden_size", 4096, Config()) == 32
    assert shrunk_value("hidden_size", 16, Config()) == 16
    assert shrunk_value("attention_dropout", 0.1, Config()) == 0.0
    assert shrunk_value("num_key_value_heads", 32, Config()) == 4  # as many as queries stay as many
    assert shrunk_value("eos_token_id", 50256, Config()) < 97


def test_reasons_are_counted_without_paths() -> None:
    reason = "no rule for x (/a/b/modeling.py:7, in forward: y = f(x)): write it with operators that streamfx knows"
    assert counted([reason, reason]) == {"no rule for x (modeling.py:7, in forward: y = f(x))": 2}


def test_rows_and_report(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"model_type": "b", "status": "exact", "worst": 1e-3}\n'
        '{"model_type": "b", "status": "exact", "worst": 1e-15, "graphs": 1, "share": 0.5, "attention": ["causal"],'
        ' "reasons": {"no rule for x (modeling.py:7, in f: y)": 2}}\n'
        '{"model_type": "a", "status": "not built", "error": "ValueError: no | such thing"}\n'
    )
    tidy(path)
    assert list(known(path)) == ["a", "b"]
    text = text_of(known(path))
    assert "| b | 1e-15 | 1 | 50 % | causal | no rule for x |" in text
    assert "| 1 | no rule for x |" in text
    assert "| a | not built: ValueError: no \\| such thing |" in text


@pytest.mark.long
def test_by_hand() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.zoo", "llama"]
    result = subprocess.run(command, cwd=Path(__file__).parents[1], env=environment, capture_output=True, text=True)
    assert '"status": "exact"' in result.stdout, result.stderr
