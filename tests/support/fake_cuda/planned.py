"""The plan of a step that `report.py` traces, as a program."""

import json
import sys
from typing import Any

import torch

import streamfx
from streamfx.tools.planner.predict import weight_bytes
from tests.support.fake_cuda.report import model_of


def planned(model: str, length: int, device: str, layers: int = 2) -> dict[str, Any]:
    """Return rows per chunk, and figures without parameters and inputs."""
    traced = model_of(model, layers, None)
    found = streamfx.plan(traced.config, seq=length, device=device, baselines=False).prediction
    own = weight_bytes(traced) + found.peak_by_term["inputs"]
    return {
        "rows": [stage["chunk_size"] for stage in found.stages],
        "peak": found.peak_bytes - own,
        **{name: getattr(found.work, name) for name in ("flops", "moved", "launches")},
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(planned(**json.loads(sys.argv[1]))))
