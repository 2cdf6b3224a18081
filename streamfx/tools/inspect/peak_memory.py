"""The peak memory of a piece of work, above the level at its start."""

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
    """Measures memory: call `start()` before the work, `bytes()` after it.

    On a CPU, the high-water mark of the process; on a GPU, that of torch's allocator.
    """

    def __init__(self, device: torch.device) -> None:
        """Measure the memory of a device."""
        self.on_gpu = device.type == "cuda"
        self.before = 0

    def start(self) -> None:
        """Reset the high-water mark to the current level."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
            return
        _return_free_memory()
        with contextlib.suppress(OSError):
            CLEAR_REFS.write_text("5")  # sets the high-water mark to the resident bytes
        self.before = _resident_bytes()

    def bytes(self) -> int:
        """Return the peak since `start`, in bytes above the level at `start`."""
        now = torch.cuda.max_memory_allocated() if self.on_gpu else _high_water_mark()
        return max(0, now - self.before)


def _return_free_memory() -> None:
    """Ask glibc to return freed memory to the system, so that it does not count as held at the start."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _resident_bytes() -> int:
    return _status_bytes("VmRSS") if STATUS.exists() else _high_water_mark()


def _high_water_mark() -> int:
    if STATUS.exists():
        return _status_bytes("VmHWM")
    import resource  # not on Windows, where nothing is measured

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _status_bytes(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0
