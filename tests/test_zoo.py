"""Tiny models of all model types of transformers are exact, and some stream in all stages."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from tests.zoo.configs import LAYERS, distinct_layers, shrunk_value
from tests.zoo.measure import counted, measured
from tests.zoo.models import grouped_products_in_float64, model_types
from tests.zoo.runs import known, text_of, tidy

pytestmark = pytest.mark.long

# one model per kind of attention, which must stream
STREAMS = {
    "bloom": {"causal"},  # slopes per head
    "cohere2": {"causal", "window(8)"},  # parallel blocks, sliding mixed with full
    "cpmant": {"masked"},  # learned relative bias
    "diffllama": {"causal"},  # differential
    "falcon": {"causal"},  # one key head, parallel
    "gemma2": {"causal", "window(8)"},  # softcap, sandwich norms
    "granite_swa": {"causal"},  # sinks by a sigmoid
    "llama4_text": {"causal"},  # chunked attention, experts over all rows
}


@pytest.mark.parametrize("name", model_types())
def test_model_types_are_exact(name: str) -> None:
    grouped_products_in_float64()
    row = measured(name)
    if row["status"] in ("not built", "not traced") and name not in STREAMS:
        pytest.skip(row["error"])
    assert row["status"] == "exact" and not row["failed"], row
    if name in STREAMS:
        assert not row["reasons"] and row["share"] == 1 and STREAMS[name] <= set(row["attention"]), row


def test_a_shrunk_model_has_a_layer_of_each_kind() -> None:
    class Config:
        num_attention_heads = 32

    kinds = ["a", "a", "b", "a", "a", "c"]
    assert distinct_layers([kinds, ["x"] * 3 + ["y"] * 3], 6) == [0, 2, 3, 5]
    assert len(distinct_layers([["a"] * 6], 6)) == LAYERS
    values = {"hidden_size": 4096, "attention_dropout": 0.1, "num_key_value_heads": 32}
    assert [shrunk_value(name, value, Config()) for name, value in values.items()] == [32, 0.0, 4]  # as many keys as queries
    assert shrunk_value("hidden_size", 16, Config()) == 16 and shrunk_value("eos_token_id", 50256, Config()) < 97


def test_reports_count_reasons_and_keep_the_last_row(tmp_path: Path) -> None:
    reason = "no rule for x (/a/b/modeling.py:7, in forward: y = f(x)): write it with operators that streamfx knows"
    assert counted([reason, reason]) == {"no rule for x (modeling.py:7, in forward: y = f(x))": 2}
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"model_type": "b", "status": "exact", "worst": 1e-3}\n'
        '{"model_type": "b", "status": "exact", "worst": 1e-15, "graphs": 1, "share": 0.5, "attention": ["causal"],'
        ' "reasons": {"no rule for x (modeling.py:7, in f: y)": 2}}\n'
        '{"model_type": "a", "status": "not built", "error": "ValueError: no | such thing"}\n'
    )
    tidy(path)
    text = text_of(known(path))
    assert list(known(path)) == ["a", "b"] and "| 1 | no rule for x |" in text
    assert "| b | 1e-15 | 1 | 50 % | causal | no rule for x |" in text
    assert "| a | not built: ValueError: no \\| such thing |" in text
