"""Amounts of memory: the forms of a memory budget, and its value in bytes.

A budget limits the peak memory of a training step: an *amount* (bytes, "24GiB", or a *share* of the device's memory, "90%"), or
"auto", the memory that is free now.
"""

from __future__ import annotations

import os
import re
import sys
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamfx.argument_checks import as_python_number

if TYPE_CHECKING:
    import torch

CONTROL_GROUP = Path("/sys/fs/cgroup")
UNITS = {
    "": 1,
    "B": 1,
    "BYTES": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "K": 2**10,  # a single letter is a power of 1,024, as in "24G" for the memory of a GPU
    "M": 2**20,
    "G": 2**30,
    "T": 2**40,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
BINARY = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))  # units of texts
AUTO = "auto"
FORMS = "bytes (a whole number), a text like '24GiB' or '24G', a share of the device ('90%', or between 0.0 and 1.0), or 'auto'"
RESERVE = 0.1  # of a device's memory: for kernel workspaces, fragmentation, and other processes
STATE_PER_PARAMETER = 2  # optimizer values, as in Adam; they are allocated after the first step
DECIMAL = re.compile(r"[KMGT]B", re.I)  # units of powers of 1,000
AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B?|bytes|%)\s*", re.I | re.ASCII)


def parse_amount(value: Any) -> int | float | None:
    """Return an amount as bytes (int) or as a share of device memory (float); None if it is not an amount of memory.

    >>> parse_amount("24GiB") == parse_amount("24 G") == 24 * 2**30, parse_amount("90%"), parse_amount("1 byte")
    (True, 0.9, None)
    """
    value = as_python_number(value)
    if isinstance(value, str):
        return _amount_of_text(value)
    if isinstance(value, float):
        return value if 0 < value <= 1 else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _amount_of_text(text: str) -> int | float | None:
    """Return the amount in a text: bytes (int) for "24GiB" or "24G", a share of device memory (float) for "90%" or "0.9".

    None if it is neither, or zero, or a share above 1.
    """
    match = AMOUNT.fullmatch(text)
    if match is None:
        return None
    number, unit = Fraction(match[1]), match[2].upper()
    if unit == "%" or (not unit and "." in match[1]):
        share = float(number / 100 if unit == "%" else number)
        return share if 0 < share <= 1 else None
    return (int(number * UNITS[unit]) or None) if unit in UNITS else None


def is_budget(value: Any) -> bool:
    """Return whether a value is a memory budget: an amount (see `FORMS`), "auto", or None."""
    return value is None or (isinstance(value, str) and value == AUTO) or parse_amount(value) is not None


def budget_bytes(budget: int | float | str, device: torch.device, held: int = 0, trained: int = 0) -> int:
    """Return the bytes of a budget; a share is relative to the device's total memory.

    "auto" is the `held` bytes that a step occupies already, plus the free memory of the device, minus a reserve, and minus the
    state that an optimizer allocates for `trained` bytes of gradients.

    >>> import torch
    >>> budget_bytes("24GiB", torch.device("cpu")), budget_bytes(1000, torch.device("cpu"))
    (25769803776, 1000)
    """
    if budget == AUTO:
        return held + max(0, free_memory(device) - int(RESERVE * total_memory(device)) - STATE_PER_PARAMETER * trained)
    amount = parse_amount(budget)
    assert amount is not None
    return int(amount * total_memory(device)) if isinstance(amount, float) else amount


def free_memory(device: torch.device) -> int:
    """Return the bytes that new tensors may use on a device.

    On a GPU: its free memory, and the unused memory that torch's allocator has reserved. On a CPU: the free memory of the
    system, or of the container, if that is less.
    """
    import torch

    if device.type == "cuda" and torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return min(_free_host_memory(), _free_container_memory())


def _free_host_memory() -> int:
    """Return the bytes that the system can provide without swapping, including droppable page cache."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    amounts = dict(line.split(":", 1) for line in lines)
    return 1024 * int(amounts["MemAvailable"].split()[0])


def _free_container_memory() -> int:
    """Return the bytes left within the memory limit of this container (control group); a huge number if there is no limit.

    Page cache counts as used there, but the system drops it on demand, so it counts as free here.
    """
    names = ("memory.max", "memory.current", "memory.stat")
    try:
        limit, used, stat = ((CONTROL_GROUP / name).read_text() for name in names)
    except OSError:
        return sys.maxsize
    if limit.strip() == "max":
        return sys.maxsize
    counters = dict(line.split() for line in stat.splitlines())
    return int(limit) - int(used) + sum(int(counters.get(name, 0)) for name in ("inactive_file", "active_file"))


def total_memory(device: torch.device) -> int:
    """Return the total memory of a device in bytes."""
    import torch

    if device.type == "cuda" and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def amount_text(given: int | float | str, size: int) -> str:
    """Return an amount of memory as text. If it was given as a share, or in powers of 1,000, it has both forms.

    >>> amount_text("24G", 24 << 30), amount_text("24GB", 24 * 10**9), amount_text(0.9, 9 << 30)
    ('24.0 GiB', '24GB (22.4 GiB)', '0.9 (9.0 GiB)')
    """
    is_binary = isinstance(parse_amount(given), int) and not DECIMAL.search(str(given))
    return format_bytes(size) if is_binary else f"{given} ({format_bytes(size)})"


def option_text(size: int) -> str:
    """Return an amount of memory as an option takes it, rounded down to a thousandth of its unit.

    >>> option_text(24 << 30), option_text(3 << 29), option_text((24 << 30) - 1), option_text(100)
    ('24GiB', '1.5GiB', '23.999GiB', '100B')
    """
    unit, unit_size = next(((unit, unit_size) for unit, unit_size in BINARY if size >= unit_size), ("B", 1))
    return f"{1000 * size // unit_size / 1000:.3f}".rstrip("0").rstrip(".") + unit


def format_bytes(size: int) -> str:
    """Return a number of bytes as text, in the largest unit of which it has at least one.

    >>> format_bytes(100), format_bytes(5 * 2**20), format_bytes(3 * 2**30)
    ('100 bytes', '5.0 MiB', '3.0 GiB')
    """
    for unit, unit_size in BINARY:
        if size >= unit_size:
            return f"{size / unit_size:.1f} {unit}"
    return f"{size} bytes"
