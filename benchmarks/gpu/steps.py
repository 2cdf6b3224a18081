"""Training steps of Qwen3-8B with random weights: seconds, memory and launches, beside what streamfx predicted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.baselines import WAYS, Loss, why_not
from benchmarks.gpu.measures import Finding, activity, host_waits
from benchmarks.gpu.models import TINY
from benchmarks.gpu.place import GIB, Place
from streamfx.tools.inspect.peak_memory import PeakMemory
from streamfx.tools.planner.devices import PUBLISHED, device_by_name
from streamfx.tools.planner.models import configuration
from streamfx.tools.report.notices import Compiled, noted_in, predicted

MODEL = "Qwen3-8B"
SMALLER = 256  # times shorter are sequences of the small form
LATER = 2  # steps after the first; the best counts


def step(place: Place, way: str, length: int) -> Iterator[Finding]:
    """The first step, which compiles; the best of those after it; what was predicted; and one step under the profiler."""
    if why := why_not(way):
        yield Finding("", {"not run": why})
        return
    length = length // SMALLER if place.small else length
    model = decoder(place)
    ids = place.tokens(model.config.vocab_size, 1, length)
    try:
        with WAYS[way](model, place.compiler) as loss:
            yield from measured(Run(place, model, loss, ids))
    except torch.OutOfMemoryError as error:
        yield Finding("", {"does not fit": " ".join(str(error).split())[:120], **counters(place)})
    finally:
        model.zero_grad(set_to_none=True)


def decoder(place: Place, layers: int | None = None) -> Any:
    """The model, shared by all checks: made on the device, in bfloat16."""
    return place.share(f"{MODEL}, {layers} layers", lambda: _made(place, layers))


def _made(place: Place, layers: int | None) -> Any:
    from transformers import AutoModelForCausalLM, logging

    logging.set_verbosity_error()
    config = configuration(MODEL)
    changes = {**(TINY if place.small else {}), "use_cache": False, **({} if layers is None else {"num_hidden_layers": layers})}
    for name, value in changes.items():
        setattr(config, name, value)
    config.layer_types = config.layer_types[: config.num_hidden_layers]
    torch.manual_seed(0)  # losses of all ways are those of the same weights, whichever worker makes them
    with torch.device(place.device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()


@dataclass
class Run:
    """A training step that is run again and again; gradients are dropped after each."""

    place: Place
    model: Any
    loss: Loss
    ids: Tensor
    compiled: list[Compiled] = field(default_factory=list)

    def once(self) -> float:
        with noted_in(self.compiled):
            loss = self.loss(self.ids)
        loss.backward()
        return float(loss.detach())

    def timed(self) -> dict[str, float]:
        """Seconds, and the peaks of the allocator: bytes that tensors took, and that it held."""
        memory = PeakMemory(torch.device(self.place.device))
        memory.start()
        start = time.perf_counter()
        loss = self.once()
        self.place.wait()
        taken = {"s": time.perf_counter() - start, "loss": loss}
        if self.place.has_cuda:
            taken |= {"peak": torch.cuda.max_memory_allocated() / GIB, "reserved": torch.cuda.max_memory_reserved() / GIB}
        else:
            taken["peak"] = memory.bytes() / GIB
        return taken

    def drop(self) -> None:
        self.model.zero_grad(set_to_none=True)


def measured(run: Run) -> Iterator[Finding]:
    before = counters(run.place)
    first = run.timed()
    gradients = [item.grad for item in run.model.parameters() if item.grad is not None]
    norm = float(torch.stack([torch.linalg.vector_norm(item, dtype=torch.float32) for item in gradients]).norm())
    del gradients
    run.drop()
    figures = {"first step s": first["s"], "first peak GiB": first["peak"], "loss": first["loss"], "gradients' norm": norm}
    yield Finding("", figures)
    later = []
    for _ in range(1 if run.place.small else LATER):
        later.append(run.timed())
        run.drop()
    best = {name: min(step[name] for step in later) for name in later[0]}
    figures = {"step s": best["s"], "peak GiB": best["peak"]}
    yield Finding("", {**figures, **({"reserved GiB": best["reserved"]} if "reserved" in best else {})})
    with host_waits(run.place) as waits:
        profiled = activity(run.place, run.once)
    run.drop()
    idle = None if profiled.idle is None else 100 * profiled.idle
    since = {name: value - before[name] for name, value in counters(run.place).items()}
    yield Finding("", {"launches": profiled.launches, "idle %": idle, "host waits": len(waits), **since})
    yield from _prediction(run)


def _prediction(run: Run) -> Iterator[Finding]:
    """What the plan of the compiled step says of it."""
    facts = next((one.facts for one in run.compiled if one.facts is not None), None)
    if facts is None or facts.program is None:
        if run.compiled:
            yield Finding("", {"plan": "nothing streams"})
        return
    cost = predicted(facts)
    held = sum(item.nbytes for item in (*run.model.parameters(), *run.model.buffers()))
    figures: dict[str, Any] = {"plan's peak GiB": (held + cost.peak) / GIB, "plan's launches": cost.work.kernels}
    if card := card_of(run.place):
        figures["plan's s"] = device_by_name(card).seconds(cost.work.compiled)
    figures["rows of chunks"] = "/".join(f"{rows:,}" for rows in sorted({loop.rows for loop in cost.loops.values()}))
    yield Finding("", figures)


def card_of(place: Place) -> str | None:
    """The card as the planner names it, if it knows it."""
    name = torch.cuda.get_device_name(place.device) if place.has_cuda else ""
    return next((known for known in PUBLISHED if known in name.replace(" ", "")), None)


def counters(place: Place) -> dict[str, int]:
    """How often the allocator had to free its cache and try again, or found no memory."""
    if not place.has_cuda:
        return {}
    stats = torch.cuda.memory_stats(place.device)
    return {"retries": stats["num_alloc_retries"], "out of memory": stats["num_ooms"]}
