"""What the backend makes of a step on a CUDA device: `python -m tests.support.fake_cuda.report '{"model": "Qwen3-8B", ...}'`."""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import torch

from streamfx.cost.memory import Cost
from streamfx.inspection.explain import Explanation
from streamfx.inspection.tracing import traced
from streamfx.ir.facts import known
from streamfx.planner.models import configuration, language_model, loss_of
from streamfx.runtime.loop import Loop
from streamfx.torch_private import FakeTensorMode
from tests.support.fake_cuda.attention import Device


def model_of(name: str, layers: int, attention: str | None) -> Any:
    """A language model of a real configuration with fewer layers."""
    config = configuration(name)
    config = getattr(config, "get_text_config", lambda: config)()
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    if attention is not None:
        config._attn_implementation = attention
    return language_model(config, torch.bfloat16, "meta")


def report(
    model: str,
    layers: int = 2,
    length: int = 8192,
    device: str = "h100",
    attention: str | None = None,
    mask: bool = False,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    card = Device(device)
    card.install()
    made = model_of(model, layers, attention)
    with FakeTensorMode():
        ids = torch.zeros(1, length, dtype=torch.int64, device="cuda")
        inputs = {"input_ids": ids, "labels": ids, **({"attention_mask": torch.ones_like(ids)} if mask else {})}
    call = traced(loss_of(made), (), inputs, options or {}, False)
    explanation = Explanation(call)
    streamed = [graph.facts for graph in call.graphs if graph.facts.program is not None]  # others make masks, say
    costs: list[Cost] = explanation.costs
    return {
        "chosen": dict(Counter(card.chosen)),
        "stopped": call.stopped,
        "reasons": [reason for facts in streamed for reason in facts.reasons()],
        "verdicts": sorted({verdict for facts in streamed for verdict in facts.causality.verdicts.values()}),
        "loops": [loop_report(loop) for facts in streamed for loop in known(facts.program).loops],
        "flops": sum(cost.flops for cost in costs),
        "moved": sum(cost.moved for cost in costs),
        "launches": sum(cost.launches for cost in costs),
        "peak": max(cost.peak for cost in costs),
    }


def loop_report(loop: Loop) -> dict[str, Any]:
    env: dict[str, int] = {}
    spec = loop.spec
    length = loop.size(spec.length, env)
    rows = loop.rows_per_chunk(length, env)
    calls = [node for node in spec.body.graph.nodes if node.op == "call_function"]
    return {"name": spec.name, "rows": rows, "chunks": -(-length // rows), "calls": len(calls), "device": str(spec.device)}


if __name__ == "__main__":
    print(json.dumps(report(**json.loads(sys.argv[1]))))
