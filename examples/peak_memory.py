"""How much memory a piece of work takes at its peak, over what the process holds before it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
import sys
from pathlib import Path

import torch

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """Start it before the work and read `bytes()` after: the process's high-water mark, or the GPU allocator's."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.before = 0

    def start(self) -> None:
        gc.collect()
        if self.on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
            return
        _give_back_free_memory()
        with contextlib.suppress(OSError):
            CLEAR_REFS.write_text("5")  # sets the high-water mark to what is resident now
        self.before = _resident_bytes()

    def bytes(self) -> int:
        now = torch.cuda.max_memory_allocated() if self.on_gpu else _high_water_mark()
        return max(0, now - self.before)


def _give_back_free_memory() -> None:
    """Ask glibc to return what it keeps of freed memory, so that it does not count as held before the work."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _resident_bytes() -> int:
    return _status("VmRSS") if STATUS.exists() else _high_water_mark()


def _high_water_mark() -> int:
    if STATUS.exists():
        return _status("VmHWM")
    import resource  # not on Windows, where nothing is measured

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _status(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0
