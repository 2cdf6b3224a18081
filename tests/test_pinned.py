"""Pinned host memory: blocks of pages are reused and freed; errors explain failures."""

import errno
import logging
import mmap
from unittest import mock

import pytest
import torch
from torch import Tensor

import streamfx
from streamfx.dialect.offload import from_host, to_host
from streamfx.runtime import offload, pinned
from streamfx.runtime.pinned import PinnedBlocks
from tests.support.streams import Device

PAGE = mmap.PAGESIZE
CPU = torch.device("cpu")


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def blocks(device: Device) -> PinnedBlocks:
    return PinnedBlocks(device, CPU, device.Stream())


def held(blocks: PinnedBlocks, pages: float) -> Tensor:
    return blocks.empty_like(torch.empty(int(pages * PAGE), dtype=torch.uint8))


def taken(device: Device) -> int:
    return sum(device.runtime.registered.values())


@pytest.mark.parametrize("value", [torch.randn(4, 1).expand(4, 3), torch.randn(4, 6)[:, ::2], torch.ones(0)])
def test_values_with_gaps(device: Device, monkeypatch: pytest.MonkeyPatch, value: Tensor) -> None:
    """They are put together before they are copied: the copy stream allocates nothing."""
    device.install(monkeypatch)
    with device.watching():
        held = offload.free_after_copy(to_host(value), value)
        found = offload.wait_for_copy(from_host(held, CPU))
        assert torch.equal(found, value)
    device.check()


def step(blocks: PinnedBlocks, pages: float, count: int = 4) -> None:
    """Values of so many pages, all alive at once."""
    kept = [held(blocks, pages) for _ in range(count)]
    assert len({value.data_ptr() for value in kept}) == count


def test_blocks_of_all_lengths_do_not_pile_up(device: Device, blocks: PinnedBlocks) -> None:
    for pages in (3, 5, 9, 4, 16, 7, 2, 11, 16, 1):
        step(blocks, pages)
        assert device.runtime.most <= 4 * 16 * PAGE
    assert taken(device) <= device.runtime.most == 4 * 16 * PAGE
    step(blocks, 16)
    before = set(device.runtime.registered)
    for pages in (16, 9, 8, 16):
        step(blocks, pages)
        assert set(device.runtime.registered) == before, "blocks are used again by lengths that are alike"


def test_blocks_that_were_not_used_lately_are_given_back(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "RECENT_ALLOCATIONS", 20)
    blocks = PinnedBlocks(device, CPU, device.Stream())
    step(blocks, 16)
    for _ in range(6):
        step(blocks, 2)
    assert taken(device) == 4 * 2 * PAGE


def test_memory_is_given_back_when_copies_are_done(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """`CudaRuntime` refuses to unregister memory that a pending task may use."""
    device.install(monkeypatch)
    with device.watching():
        for pages in (1, 2, 4, 8):
            value = torch.ones(pages * PAGE, dtype=torch.uint8)
            offload.free_after_copy(to_host(value), value)
    assert len(device.runtime.registered) == 1
    device.check()


# -- hosts that refuse


def test_torch_pins_memory_that_cannot_be_registered(
    device: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning states the wasted bytes; the next launch does not raise CUDA's pending error."""
    device.install(monkeypatch)
    device.runtime.limit = 4 * PAGE
    monkeypatch.setattr(pinned, "pinned_by_torch", lambda size: torch.empty(size, dtype=torch.uint8))
    with caplog.at_level(logging.WARNING, "streamfx"), device.watching():
        kept = [to_host(torch.full((5 * PAGE // 2,), number, dtype=torch.uint8)) for number in range(4)]
    assert [int(value[-1]) for value in kept] == list(range(4))
    (record,) = caplog.records
    whole, wasted = (f"{size / 1024:.1f} KiB" for size in (4 * PAGE, 4 * PAGE - 5 * PAGE // 2))
    assert f"power of two: this value takes {whole}, of which {wasted} are wasted" in record.getMessage()
    assert device.runtime.refused == [3 * PAGE]
    device.check()


def test_a_full_host(blocks: PinnedBlocks, monkeypatch: pytest.MonkeyPatch, device: Device) -> None:
    """The system would end the process; unused blocks are given back before the step is refused."""
    step(blocks, 4, 2)
    free = iter([3 * PAGE, 11 * PAGE, 11 * PAGE, 11 * PAGE])
    monkeypatch.setattr(pinned, "free_memory", lambda _: next(free))
    kept = held(blocks, 10)
    assert taken(device) == 10 * PAGE
    why = r"no space for 48.0 KiB: 44.0 KiB of the host's memory are free(?s:.*)limit"
    with pytest.raises(streamfx.OffloadSpaceError, match=why) as found:
        held(blocks, 12)
    assert (found.value.needed, found.value.free, found.value.folder) == (12 * PAGE, 11 * PAGE, "")
    assert "40.0 KiB are in use" in str(found.value)
    assert kept.nbytes == 10 * PAGE


def test_a_mapping_that_the_system_refuses(blocks: PinnedBlocks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "mmap", mock.Mock(side_effect=OSError(errno.ENOMEM, "Cannot allocate memory")))
    with pytest.raises(streamfx.OffloadSpaceError, match=r"no space for 4\.0 KiB: Cannot allocate memory"):
        held(blocks, 1)


def test_memory_that_cannot_be_pinned(device: Device, blocks: PinnedBlocks, monkeypatch: pytest.MonkeyPatch) -> None:
    out = RuntimeError("CUDA error: out of memory\nmore")
    monkeypatch.setattr(pinned, "pinned_by_torch", mock.Mock(side_effect=out))
    device.runtime.limit, resource = 0, pytest.importorskip("resource")
    for limit, note in ((1 << 16, "; RLIMIT_MEMLOCK is 64.0 KiB"), (resource.RLIM_INFINITY, "")):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        with pytest.raises(streamfx.OffloadSpaceError, match=rf"\(CUDA error: out of memory\){note};(?s:.*)ulimit -l"):
            held(blocks, 1)
