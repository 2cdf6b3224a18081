"""Nothing of ours warns: a training step, `explain` and `verify` run under `-W error`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import torch

import streamfx
from tests.support.small import Causal, tokens


class WithLogits(Causal):
    def forward(self, ids, labels):
        return super().forward(ids, labels), self.head(self.embed(ids))


def train(model, call):
    optimizer = torch.optim.AdamW(model.parameters())
    for length in (37, 21):
        loss, logits = call(tokens(2, length), tokens(2, length))
        (loss + logits.amax(-1).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        call(tokens(2, 21), tokens(2, 21))


model, ids = WithLogits().double(), tokens(2, 37)
within = {"memory_budget": "40KiB", "offload": "inputs", "bodies": "eager"}
for options in ({"chunk_size": 8}, within, *asked):
    torch._dynamo.reset()
    train(model, torch.compile(model, backend="streambp", options=options))
str(streamfx.explain(model, ids, ids))
streamfx.verify(model, ids, ids, loss=lambda output: output[0])
"""


@pytest.mark.parametrize(
    "asked", [(), pytest.param(({"memory_budget": "1GiB"},), marks=pytest.mark.long)], ids=["eager", "Inductor"]
)
def test_a_step_under_w_error(asked: tuple[dict[str, str], ...]) -> None:
    command = [sys.executable, "-W", "error", "-c", f"asked = {asked}\n{PROGRAM}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
