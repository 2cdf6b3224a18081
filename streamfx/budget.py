"""Amounts of memory: what a budget may be called, and how many bytes it is."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import torch

CONTROL_GROUP = Path("/sys/fs/cgroup")
UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
AUTO = "auto"
RESERVE = 0.1  # of a device's memory: for workspaces of kernels, fragmentation, and what others take meanwhile
STATE = 2  # numbers that an optimizer keeps beside a trained one, as Adam does; they are made after the first step
AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)\s*", re.I)


def is_budget(value: Any) -> bool:
    """Whether a value says how much memory there is: bytes, a text like "24GiB", a share of the device's, "auto", or None."""
    if isinstance(value, bool):
        return False
    if isinstance(value, str):
        return value == AUTO or ((match := AMOUNT.fullmatch(value)) is not None and match[2].upper() in UNITS)
    if isinstance(value, float):
        return 0 < value <= 1
    return value is None or (isinstance(value, int) and value > 0)


def bytes_of(budget: int | float | str, device: torch.device, held: int = 0, trained: int = 0) -> int:
    """The bytes of a budget; a share is one of the memory that the device has.

    "auto" is what a step holds already, and what is free on the device now, less a reserve and the state that an optimizer makes
    for `trained` bytes of gradients.

    >>> bytes_of("24GiB", torch.device("cpu")), bytes_of(1000, torch.device("cpu"))
    (25769803776, 1000)
    """
    if budget == AUTO:
        return held + max(0, free_on(device) - int(RESERVE * memory_of(device)) - STATE * trained)
    if isinstance(budget, str):
        match = AMOUNT.fullmatch(budget)
        assert match is not None
        return int(float(match[1]) * UNITS[match[2].upper()])
    return int(budget * memory_of(device)) if isinstance(budget, float) else budget


def free_on(device: torch.device) -> int:
    """Bytes that new tensors may take on a device: free ones, and those that its allocator holds for nobody."""
    if device.type == "cuda" and torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return min(_free_of_host(), _free_of_group())


def _free_of_host() -> int:
    """Bytes that the system can give without swapping: pages of files that it can drop are among them."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    amounts = dict(line.split(":", 1) for line in lines)
    return 1024 * int(amounts["MemAvailable"].split()[0])


def _free_of_group() -> int:
    """Bytes left of what a container allows."""
    try:
        limit, used = ((CONTROL_GROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return sys.maxsize
    return sys.maxsize if limit == "max" else int(limit) - int(used)


def memory_of(device: torch.device) -> int:
    """Bytes of memory that a device has."""
    if device.type == "cuda" and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def in_bytes(number: int) -> str:
    """
    >>> in_bytes(100), in_bytes(5 * 2**20), in_bytes(3 * 2**30)
    ('100 bytes', '5.0 MiB', '3.0 GiB')
    """
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} bytes"
