"""The backend's result for a step on a CUDA device: `python -m tests.support.fake_cuda.report '{"model": "Qwen3-8B", ...}'`."""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from streamfx.cost.memory import Cost
from streamfx.cost.meter import Meter
from streamfx.integrations import packing
from streamfx.ir.facts import known
from streamfx.ir.program import BufferOutput
from streamfx.kernels import plain_attention, sdpa
from streamfx.kernels.attention_call import AttentionCall
from streamfx.kernels.cuda_attention import flash_supports
from streamfx.runtime.loop import Loop
from streamfx.tools.inspect.explain import Explanation
from streamfx.tools.inspect.tracing import traced
from streamfx.tools.planner.models import configuration, language_model, loss_of
from streamfx.torch_private import FakeTensorMode
from tests.support.fake_cuda.attention import Device
from tests.support.flash_package import for_transformers

DOCUMENTS = 5


def model_of(source: Any, layers: int, attention: str | None, dtype: str = "bfloat16") -> Any:
    """A language model of a real configuration, or of the given one, with fewer layers: one of each kind, where kinds differ."""
    config = configuration(source)
    config = getattr(config, "get_text_config", lambda: config)()
    if isinstance(source, str):
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = [*dict.fromkeys(config.layer_types), *config.layer_types][:layers]
    if attention is not None:
        config._attn_implementation = attention
    return language_model(config, getattr(torch, dtype), "meta")


def inputs_of(given: str, batch: int, length: int) -> dict[str, Any]:
    """Ids and labels; with a padding mask, positions that begin anew with each document, or where documents end."""
    ids = torch.zeros(batch, length, dtype=torch.int64, device="cuda")
    plain: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if given == "mask":
        return {**plain, "attention_mask": torch.ones_like(ids)}
    if given == "positions":
        return {**plain, "position_ids": torch.zeros_like(ids)}
    if given == "ends":
        ends = {f"cu_seq_lens_{name}": _ends() for name in "qk"}
        return {**plain, **ends, "max_length_q": length, "max_length_k": length}
    assert given == "plain"
    return plain


def _ends() -> Tensor:
    return torch.zeros(DOCUMENTS + 1, dtype=torch.int32, device="cuda")


def known_numbers(given: str) -> AbstractContextManager[Any]:
    """Answer transformers' question whether a mask hides something: fake tensors have no values."""
    from transformers import masking_utils

    return patch.object(masking_utils, "fast_all", lambda mask: False) if given == "mask" else nullcontext()


@contextmanager
def noted_kernels() -> Iterator[Counter[str]]:
    """The attention kernels that programs call while they are followed."""
    found: Counter[str] = Counter()
    count = Meter._count

    def noted(self: Meter, func: Any, *others: Any) -> None:
        name = func.name() if hasattr(func, "name") else ""
        if name.startswith("aten::_scaled_dot_product"):
            found[name.removeprefix("aten::_scaled_dot_product_").removesuffix("_backward").removesuffix("_attention")] += 1
        elif name.startswith("aten::_flash_attention"):
            found["flash"] += 1
        elif name.startswith("streamfx::attention_window"):
            call = AttentionCall(*(others[0][-3:] if name.endswith("window") else others[0][1:4]))
            found["flash" if flash_supports(call) else "efficient, at the end"] += 1
        count(self, func, *others)

    def plain(call: AttentionCall) -> tuple[Tensor, Tensor]:
        found["plain"] += 1
        return plain_attention.forward(call)

    with patch.object(Meter, "_count", noted), patch.object(sdpa, "PLAIN", sdpa.PLAIN._replace(forward=plain)):
        yield found


def report(
    model: Any,
    layers: int = 2,
    length: int = 8192,
    batch: int = 1,
    device: str = "h100",
    attention: str | None = None,
    given: str = "plain",
    dtype: str = "bfloat16",
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the streamed share of a call, the kernels that eager would call (`chosen`), and those of the loops (`kernels`)."""
    card = Device(device)
    card.install()
    with for_transformers(), known_numbers(given):
        step = loss_of(model_of(model, layers, attention, dtype))
        with FakeTensorMode():
            inputs = inputs_of(given, batch, length)
            found = _ends() if given == "positions" else False
        is_told = attention == "flash_attention_2" and batch == 1 and given != "ends"
        if is_told:  # as `streamfx.enable` has it
            packing.replace_functions()
        call = traced(
            packing.with_boundaries(step) if is_told else step, (found,) if is_told else (), inputs, options or {}, False
        )
    explanation = Explanation(call)
    streamed = [graph.facts for graph in call.graphs if graph.facts.program is not None]  # others make masks, say
    with noted_kernels() as called:
        costs: list[Cost] = explanation.costs
    return {
        "chosen": dict(Counter(card.chosen)),
        "kernels": dict(called),
        "stopped": call.stopped,
        "graphs": len(call.graphs),
        "failed": [facts.analysis_error for facts in streamed if facts.analysis_error],
        "reasons": [reason for facts in streamed for reason in facts.reasons()],
        "verdicts": sorted({verdict for facts in streamed for verdict in facts.key_spans.span_kinds.values()}),
        "loops": [loop_report(loop) for facts in streamed for loop in known(facts.program).loops],
        "flops": sum(cost.flops for cost in costs),
        "streamed": sum(cost.streamed_flops for cost in costs) / max(sum(cost.flops for cost in costs), 1),
        "moved": sum(cost.work.moved for cost in costs),
        "launches": sum(cost.work.launches for cost in costs),
        "peak": max(cost.peak for cost in costs),
    }


def loop_report(loop: Loop) -> dict[str, Any]:
    env: dict[str, int] = {}
    spec = loop.spec
    length = loop.size(spec.length, env)
    rows = loop.rows_per_chunk(length, env)
    devices = {str(part.device) for part in (*spec.buffers, *spec.yields) if not isinstance(part, BufferOutput)}
    return {
        "name": spec.name,
        "rows": rows,
        "last": length % rows or rows,
        "chunks": -(-length // rows),
        "devices": sorted(devices),
        "sums": {buffer.name: "zeroed" if buffer.zeroed else "written first" for buffer in spec.buffers if buffer.is_sum},
    }


if __name__ == "__main__":
    print(json.dumps(report(**json.loads(sys.argv[1]))))
