"""Tiny models of all model types of transformers are exact, and some stream in all stages."""

import pytest

pytest.importorskip("transformers")

from tests.zoo.measure import measured
from tests.zoo.models import grouped_products_in_float64, model_types

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
