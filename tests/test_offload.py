"""What waits on the host while a CPU trains waits in files, not in the process's memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from streamfx.runtime.offload import mapped

STATUS = Path("/proc/self/status")


def resident_bytes() -> int:
    found = re.search(r"^VmRSS:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


@pytest.mark.skipif(not STATUS.exists(), reason="only Linux tells")
def test_pages_are_left_to_the_file() -> None:
    mapped(torch.ones(8))
    value = torch.randn(1 << 23)
    before = resident_bytes()
    held = mapped(value)
    assert resident_bytes() - before < value.nbytes // 4
    assert torch.equal(held, value)


def test_nothing_waits_as_nothing() -> None:
    assert mapped(torch.empty(0, 4)).shape == (0, 4)
