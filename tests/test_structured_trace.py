"""`TORCH_TRACE` has what became of each graph, as artifacts that tlparse shows."""

from __future__ import annotations

import json
import os
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
    environment = {**os.environ, "TORCH_TRACE": str(tmp_path)}
    command, root = [sys.executable, "-c", PROGRAM], Path(__file__).parents[1]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    (trace,) = tmp_path.iterdir()
    found, name = dict[str, str](), ""
    for line in trace.read_text().splitlines():
        if line.startswith("\t"):  # of the payload of the record above
            found[name] = found.get(name, "") + line[1:] + "\n"
        else:
            record = json.loads(line[line.index("{") :])
            name = record.get("artifact", {}).get("name", "")
    assert "every stage streams" in found["streamfx_stages"] and "at the peak" in found["streamfx_stages"]
    assert "head_forward" in found["streamfx_rewrite"]
