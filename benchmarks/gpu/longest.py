"""The longest sequence that a step takes within a cap on the device's memory, with a few layers of Qwen3-8B."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from benchmarks.gpu.baselines import WAYS
from benchmarks.gpu.measures import Finding
from benchmarks.gpu.place import GIB, Place
from benchmarks.gpu.steps import Run, decoder
from benchmarks.live_bytes import peak_live_bytes

LAYERS, CAP = 8, 16 * GIB  # of which weights and gradients of 8 layers, embeddings and head take 10.4 GiB
SMALL_LAYERS, SMALL_CAP = 1, 512 << 10
PROBES, SMALL_PROBES = (8192, 16384), (64, 128)
MULTIPLE, SMALL_MULTIPLE = 1024, 16
MARGIN, SHORTER, LONGER, TRIES = 0.97, 0.9, 1.1, 3  # peaks are a line, almost; then how a length that fails or runs changes


def longest(place: Place, way: str) -> Iterator[Finding]:
    """Two lengths show bytes per token; lengths near the one that this foretells are tried until one runs and one does not."""
    cap, multiple = (SMALL_CAP, SMALL_MULTIPLE) if place.small else (CAP, MULTIPLE)
    with capped(place, cap):
        probes = SMALL_PROBES if place.small else PROBES
        peaks = [peak(place, way, length, cap) for length in probes]
        low, high = (found for found in peaks) if None not in peaks else (0, 0)
        if not low or not high or high <= low:
            yield Finding(
                "", {"cap GiB": cap / GIB, "probes GiB": str([None if p is None else round(p / GIB, 3) for p in peaks])}
            )
            return
        slope = (high - low) / (probes[1] - probes[0])
        yield Finding("", {"cap GiB": cap / GIB, "per token KiB": slope / 1024})
        length = int(MARGIN * (probes[1] + (cap - high) / slope)) // multiple * multiple
        runs, fails = [probes[1]], list[int]()
        for _ in range(1 if place.small else TRIES):
            (runs if peak(place, way, length, cap) is not None else fails).append(length)
            yield Finding("", {"longest that ran tokens": max(runs), "shortest that did not tokens": min(fails, default=None)})
            if len(runs) > 1 and fails:
                return
            length = int(length * (SHORTER if fails else LONGER)) // multiple * multiple


def peak(place: Place, way: str, length: int, cap: int) -> int | None:
    """Bytes of a step at its peak; None if it does not fit."""
    model = decoder(place, SMALL_LAYERS if place.small else LAYERS)
    try:
        with WAYS[way](model, place.compiler) as loss:
            run = Run(place, model, loss, place.tokens(model.config.vocab_size, 1, length))
            run.once()
            run.drop()
            place.wait()
            return _within(place, run, cap)
    except torch.OutOfMemoryError:
        return None
    finally:
        model.zero_grad(set_to_none=True)
        torch._dynamo.reset()
        if place.has_cuda:
            torch.cuda.empty_cache()


def _within(place: Place, run: Run, cap: int) -> int | None:
    """The peak of a step after the first. A CPU has no cap: bytes of tensors are counted."""
    if place.has_cuda:
        torch.cuda.reset_peak_memory_stats()
        run.once()
        return int(torch.cuda.max_memory_allocated())
    found = peak_live_bytes(run.once)
    return found if found <= cap else None


@contextmanager
def capped(place: Place, cap: int) -> Iterator[None]:
    """Let the allocator take no more than so many bytes of the device."""
    if not place.has_cuda:
        yield
        return
    total = torch.cuda.get_device_properties(place.device).total_memory
    place.kept.clear()  # models of other checks would count
    place.clean()
    torch.cuda.set_per_process_memory_fraction(cap / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        place.kept.clear()
