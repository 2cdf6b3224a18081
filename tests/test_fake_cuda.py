"""Steps of real configurations as they are on a GPU, traced for one without one: what streams, and in chunks of how many rows."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.fake_cuda import COMPILER, reported

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

CAUSAL = ["causal"]
CASES: dict[str, tuple[dict[str, Any], set[str], list[str]]] = {  # what is asked, what eager attention would be, what is seen
    "Qwen3 on an H100": ({"model": "Qwen3-4B"}, {"cudnn"}, CAUSAL),
    "Qwen3 on an A100": ({"model": "Qwen3-4B", "device": "a100"}, {"efficient"}, CAUSAL),
    "Qwen3 with a mask": ({"model": "Qwen3-4B", "mask": True}, {"cudnn"}, CAUSAL),
    # its mask comes out of a graph of its own, and is looked at when it has numbers, which here it has not
    "Qwen3 with flex attention": ({"model": "Qwen3-4B", "attention": "flex_attention"}, set(), ["masked"]),
    "Qwen3 on a T4": ({"model": "Qwen3-4B", "device": "t4"}, {"math"}, CAUSAL),
    "Llama": ({"model": "Llama-3.1-8B"}, {"cudnn"}, CAUSAL),
    "Gemma 3": ({"model": "Gemma-3-1B"}, {"efficient"}, ["window(512)"]),
    "GPT-OSS": ({"model": "GPT-OSS-20B"}, set(), ["causal", "window(128)"]),
}
DEFAULT = ("Qwen3 on an H100",)


@pytest.mark.parametrize("name", [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.long) for name in CASES])
def test_all_of_it_streams(name: str) -> None:
    asked, chosen, verdicts = CASES[name]
    found = reported(length=4096, **asked)
    assert not found["stopped"] and not found["reasons"]
    assert found["verdicts"] == verdicts
    assert set(found["chosen"]) == chosen
    assert found["loops"] and all(loop["device"] == "cuda:0" for loop in found["loops"])


@pytest.mark.long
def test_chunks_at_real_sizes() -> None:
    """A GPU is given enough to do: of all bytes that are moved beside products, few are moved for the sake of chunks."""
    found = reported(model="Qwen3-8B", layers=36)
    rows = {loop["name"]: loop["rows"] for loop in found["loops"]}
    assert all(2048 <= number <= 8192 for number in rows.values()), rows
    whole = reported(model="Qwen3-8B", layers=36, options={"chunk_size": 8192, "loss_chunk_size": 8192})
    assert found["moved"] <= 1.1 * whole["moved"]
    assert found["flops"] <= 1.01 * whole["flops"]
