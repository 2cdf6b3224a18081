"""Measures one model type: whether it is exact, which stages stream, and why others do not."""

import copy
import re
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from streamfx.cost.memory import cost_of
from streamfx.frontend.backend import Compilation
from streamfx.options import resolve_options
from streamfx.tools.inspect.graph_breaks import distinct_breaks
from streamfx.tools.report.fallback_reasons import SINGLE_ROW
from streamfx.tools.report.stage_table import stage_reports
from streamfx.torch_private.dynamo import record_graph_breaks
from tests.support.exactness import Outcome, Recorder, errors, outcome
from tests.support.precision import default_dtype
from tests.zoo.models import CHUNK, built, dtype_of, inputs

BOUND = 1e-11  # of a relative error in float64
MOST = 300  # characters of an error that a row keeps

Row = dict[str, Any]


@dataclass
class Kept(Compilation):
    """A compilation that keeps the forward and backward graph of each of its facts."""

    halves: list[tuple[fx.GraphModule, fx.GraphModule | None, int]] = field(default_factory=list)

    def partition(self, joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **others: Any) -> Any:
        known = len(self.facts)
        forward, backward = super().partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **others)
        if len(self.facts) > known:
            self.halves.append((forward, backward, num_fwd_outputs))
        return forward, backward

    def run_inference(self, module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        function = super().run_inference(module, inputs)
        program = self.facts[-1].program
        self.halves.append((module if program is None else program.forward, None, len(module.graph.output_node().args[0])))  # type: ignore[arg-type]
        return function


def measured(model_type: str) -> Row:
    """The row of a model type.

    `status` is "exact", "inexact", "crashed" (streamfx raised), "not traced" (so does AOTAutograd alone) or "not built"
    (transformers itself cannot run it).
    """
    warnings.filterwarnings("ignore")
    with default_dtype(dtype_of(model_type)):
        return _measured(model_type)


def _measured(model_type: str) -> Row:
    started = time.monotonic()
    row: Row = {"model_type": model_type}
    try:
        model = built(model_type)
        given = inputs(model_type, model)
        truth = outcome(eager := copy.deepcopy(model), eager, given)
    except Exception as error:
        return row | {"status": "not built", "error": described(error)}
    row["seconds_eager"] = round(time.monotonic() - started, 1)
    try:
        row |= compared(model, given, truth)
    except Exception as error:
        row |= {"status": "crashed" if runs_alone(model, given) else "not traced", "error": described(error)}
    return row | {"seconds": round(time.monotonic() - started, 1)}


def compared(model: nn.Module, given: dict[str, Any], truth: Outcome) -> Row:
    torch._dynamo.reset()
    options = resolve_options({"outputs": "dense", "chunk_size": CHUNK, "loss_chunk_size": CHUNK})
    backend, own = Recorder(options, kind=Kept), copy.deepcopy(model)
    with record_graph_breaks() as breaks:
        found = errors(outcome(torch.compile(own, backend=backend), own, given), truth)
    apart = [] if max(found.values()) <= BOUND else differs_alone(model, given, truth)
    name, worst = max(((name, error) for name, error in found.items() if name not in apart), key=lambda item: item[1])
    row: Row = {"status": "exact" if worst <= BOUND else "inexact", "worst": worst, "worst_name": name, "apart": apart}
    row["breaks"] = [f"{item.reason} ({item.where})"[:MOST] for item in distinct_breaks(breaks)]
    return row | findings(backend)


def differs_alone(model: nn.Module, given: dict[str, Any], truth: Outcome) -> list[str]:
    """Results in which AOTAutograd differs from eager without streamfx: zeros for gradients of unused values."""
    return [name for name, error in errors(alone(model, given), truth).items() if error > BOUND]


def alone(model: nn.Module, given: dict[str, Any]) -> Outcome:
    torch._dynamo.reset()
    own = copy.deepcopy(model)
    return outcome(torch.compile(own, backend="aot_eager"), own, given)


def runs_alone(model: nn.Module, given: dict[str, Any]) -> bool:
    try:
        alone(model, given)
    except Exception:
        return False
    return True


def findings(backend: Recorder) -> Row:
    """Stages, attention, FLOPs in loops, and the reasons of stages that do not stream, with counts.

    A graph with a single row is one chunk: it has a reason, but does not prevent streaming.
    """
    streamed = total = 0
    stages: list[list[Any]] = []
    attention: list[str] = []
    reasons: list[str] = []
    also: list[str] = []
    failed: list[str] = []
    number = 0
    for kept in backend.compilations:
        for facts, (forward, backward, count) in zip(kept.facts, kept.halves, strict=False):
            cost = cost_of(forward, backward, count)
            streamed, total = streamed + cost.streamed_flops, total + cost.flops
            for report in stage_reports(facts, number, cost.loops):
                stages.append([report.name, report.kind, report.flops])
                attention += report.attention
                reasons += [reason for reason in report.reasons if reason != SINGLE_ROW]
                also += [*report.also_whole, *(reason for reason in report.reasons if reason == SINGLE_ROW)]
            failed += [facts.analysis_error[:MOST]] if facts.analysis_error else []
            number += 1
    return {
        "graphs": number,
        "stages": stages,
        "attention": sorted(set(attention)),
        "flops": total,
        "share": round(streamed / total, 4) if total else None,
        "reasons": counted(reasons),
        "also_whole": counted(also),
        "failed": failed,
    }


def counted(reasons: list[str]) -> dict[str, int]:
    """Counts of reasons, without their advice and without paths of this machine."""
    found: dict[str, int] = {}
    for reason in reasons:
        text = re.sub(r"(\): |: )(let it run|write it|compile a larger|keep the parts|compare row indices).*", r")", reason)
        text = re.sub(r"/\S*/(\w+\.py)", r"\1", text)
        found[text] = found.get(text, 0) + 1
    return found


def described(error: BaseException) -> str:
    """Type, first line, and where in the model's code it was raised."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    text = " ".join(lines[:2])
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "transformers" in frame.filename]
    where = f" [{frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno}]" if frames else ""
    return f"{type(error).__name__}: {text}"[:MOST] + where
