"""Loop bodies and our own kernels as machine code for an H100, which the bundled ptxas makes without a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.support.fake_cuda import COMPILER, reported

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler"),
    pytest.mark.skipif(
        torch.version.cuda is None or find_spec("triton") is None, reason="needs a CUDA build of PyTorch, and Triton"
    ),
]
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-8B": {"model": "Qwen3-8B"},
    "GPT-OSS-20B": {"model": "GPT-OSS-20B"},
    "Gemma-3-12B": {"model": "Gemma-3-12B"},
    "Qwen3-8B, two lengths of chunks": {"model": "Qwen3-8B", "length": 9000},
}
DEFAULT = "Qwen3-8B"


@pytest.mark.parametrize("name", [name if name == DEFAULT else pytest.param(name, marks=pytest.mark.long) for name in MODELS])
def test_bodies_for_an_h100(name: str, recorded: Callable[[Mapping[str, int]], None]) -> None:
    """All kernels compile, none is timed on example arguments meanwhile, and they become neither more nor move more bytes."""
    parts = reported("bodies", **MODELS[name])["parts"]
    figures: dict[str, int] = {}
    numbers: Counter[str] = Counter()
    for part in parts:
        assert len(part["codes"]) >= part["kernels"] > 0 and all(part["codes"])
        assert not part["tuning"], "Inductor allocates example arguments, which no plan counts"
        assert not part["unguarded"], "a loop may read what another thread has yet to write in an earlier loop of its kernel"
        numbers[part["loop"]] += 1
        place = f"{part['loop']}, part {numbers[part['loop']]}"
        figures[f"kernels: {place}"] = part["kernels"]
        figures[f"bytes per row: {place}"] = -(-part["moved"] // part["rows"])
    assert sum(part["loops"] for part in parts) > len(parts)
    figures["kernels"] = sum(part["kernels"] for part in parts)
    recorded(figures)
