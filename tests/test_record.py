"""explain, verify, plan, profile and the log agree about a model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import streamfx
from streamfx.budget import format_bytes
from tests.support.small import Causal, tokens
from tests.support.spread import only

pytestmark = pytest.mark.compiled

ROWS, GIVEN = 48, {"chunk_size": 16, "loss_chunk_size": 16}
Mix = Callable[[Tensor], Tensor]


class Of(Causal):
    """A decoder with another function of all rows."""

    def __init__(self, mix: Mix) -> None:
        super().__init__()
        self.mix = mix

    def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(ids, ids) + self.mix(self.q(self.embed(ids))).square().mean()


CASES: dict[str, tuple[Mix, dict[str, Any]]] = {
    "causal": (torch.tanh, GIVEN),
    "recomputed": (torch.tanh, {"chunk_size": 16, "loss_chunk_size": 24, "save": "inputs"}),
    "every second": (torch.tanh, {**GIVEN, "keep_every": 2}),
    "dense": (torch.tanh, {**GIVEN, "outputs": "dense", "gradients": "stagewise"}),
    "within a budget": (torch.tanh, {"memory_budget": "1G"}),
    "a running sum": (lambda x: x.cumsum(1), GIVEN),
    "sorted": (lambda x: x.sort(1).values, GIVEN),
    "other order": (lambda x: x.flip(1), GIVEN),
    "a norm over rows": (lambda x: x.softmax(1), GIVEN),
}


def inputs(batch: int, length: int) -> dict[str, Tensor]:
    return {"ids": torch.empty(batch, length, dtype=torch.int64, device="meta")}


@pytest.mark.parametrize("name", only(["recomputed", "sorted"], CASES))
def test_five_reports_agree(name: str) -> None:
    mix, given = CASES[name]
    model, ids, options = Of(mix), tokens(2, ROWS), {**given, "bodies": "eager"}
    explained = streamfx.explain(model, ids, options=options)
    verified = streamfx.verify(model, ids, options=options)
    with torch.device("meta"):
        of_meta = Of(mix)
    planned = streamfx.plan(of_meta, seq=ROWS, batch=2, inputs=inputs, device="here", baselines=False, options=options)
    with streamfx.enable(model, options=options) as enabled:
        model(ids).backward()
        model.zero_grad()
        with streamfx.profile() as profile:
            model(ids).backward()
    (logged,), (record,) = enabled.compiled, verified.records
    summary, stages = explained.summary(), [stage.as_dict() for stage in explained.stages]
    assert verified.ok and record.plain == stages == planned.prediction.stages
    loops = {run["name"]: (stage["name"], run["chunks"]) for stage in stages for run in stage["runs"]}
    assert {loop.name: (loop.stage, loop.chunks) for loop in profile.measured.loops} == loops
    if not loops:
        assert all("nothing streams" in str(text) for text in (explained, logged.text, planned))
        return
    said = str(explained).splitlines()[1].strip().partition(";")[0]
    assert said == record.streams == planned.prediction.streams
    assert f"  ran: {said}, {record.rows}" in str(verified)
    assert f": {said}" in logged.text and f", {record.rows}, peak predicted {format_bytes(summary['peak_bytes'])}" in logged.text
    held = sum(parameter.nbytes for parameter in of_meta.parameters()) + ids.nbytes
    assert profile.predicted_peak_bytes == summary["peak_bytes"] == planned.prediction.peak_bytes - held
