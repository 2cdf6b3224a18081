"""`TORCH_TRACE` has what became of each graph, as artifacts that tlparse shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import torch
from tests.support.small import Causal, tokens

ids = tokens(2, 64)
torch.compile(Causal(), backend="streambp", options={"chunk_size": 16, "bodies": "eager"})(ids, ids).backward()
"""


@pytest.mark.long
def test_stages_and_listing_are_artifacts(tmp_path: Path) -> None:
    environment, root = {**os.environ, "TORCH_TRACE": str(tmp_path)}, Path(__file__).parents[1]
    subprocess.run([sys.executable, "-c", PROGRAM], cwd=root, env=environment, check=True)
    (trace,) = tmp_path.iterdir()
    stages, listing = (
        "".join(re.findall(rf'"name": "streamfx_{name}".*\n((?:\t.*\n)+)', trace.read_text()))
        for name in ("stages", "build_program")
    )
    assert "every stage streams" in stages and "at the peak" in stages
    assert "head_forward" in listing
