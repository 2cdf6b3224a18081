"""On a CPU, offloaded values are in files, not in the process's memory."""

import errno
import logging
import os
import re
import shutil
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch

import streamfx
from streamfx.runtime import files
from streamfx.runtime.files import copy_to_file

STATUS = Path("/proc/self/status")


def resident_bytes() -> int:
    (found,) = re.findall(r"^VmRSS:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE)
    return int(found) * 1024


@pytest.mark.skipif(not STATUS.exists(), reason="only Linux tells")
def test_pages_belong_to_the_file() -> None:
    copy_to_file(torch.ones(8))
    value = torch.randn(1 << 23)
    before = resident_bytes()
    held = copy_to_file(value)
    assert resident_bytes() - before < value.nbytes // 4
    assert torch.equal(held, value)
    assert copy_to_file(torch.empty(0, 4)).shape == (0, 4)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    files._warn_of_memory.cache_clear()
    return tmp_path


def test_a_limit_on_files(folder: Path) -> None:
    """The system refuses the file, and no part of it remains."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, before[1]))
    try:
        with pytest.raises(streamfx.OffloadSpaceError) as found:
            copy_to_file(torch.ones(1 << 12))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (found.value.folder, found.value.needed) == (str(folder), 1 << 14)
    assert "no space for 16.0 KiB: File too large; RLIMIT_FSIZE limits a file to 4.0 KiB" in str(found.value)
    assert "ulimit -f" in str(found.value) and "are free" not in str(found.value)
    assert str(folder) in str(found.value)
    assert not list(folder.iterdir())


@pytest.mark.parametrize("name", ["posix_fallocate", "write"])
def test_a_full_disk(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on systems that cannot reserve room for a file other than by writing to it."""

    if name == "write":
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
        assert torch.equal(copy_to_file(torch.ones(1 << 19)), torch.ones(1 << 19))
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, name, mock.Mock(side_effect=full), raising=False)
    with pytest.raises(
        streamfx.OffloadSpaceError, match=r"no space for 32 bytes: No space left on device; [\d.]+ \w+ are free"
    ) as found:
        copy_to_file(torch.ones(8))
    assert found.value.free == pytest.approx(shutil.disk_usage(folder).free, rel=0.5)
    assert not list(folder.iterdir())


def test_no_folder_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    none = FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/a', '/b']")
    monkeypatch.setattr(tempfile, "gettempdir", mock.Mock(side_effect=none))
    with pytest.raises(streamfx.OffloadSpaceError, match="No usable temporary directory"):
        copy_to_file(torch.ones(8))


def test_a_folder_in_memory_is_warned_of_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mounts = folder / "mounts with space"
    (mounts / "tmp").mkdir(parents=True)
    table = folder / "table"
    written = str(mounts).replace(" ", r"\040")
    table.write_text(f"/dev/x {folder} ext4 rw 0 0\nnone {written} tmpfs rw 0 0\nx / ext4 rw 0 0\n")
    monkeypatch.setattr(files, "MOUNTS", table)
    assert files.file_system_of(str(folder)) == "ext4"
    copy_to_file(torch.ones(8))
    assert not caplog.records
    monkeypatch.setattr(tempfile, "tempdir", str(mounts / "tmp"))
    with caplog.at_level(logging.WARNING, "streamfx"):
        copy_to_file(torch.ones(8))
        copy_to_file(torch.ones(8))
    assert ["in memory itself (tmpfs)" in record.getMessage() for record in caplog.records] == [True]
    monkeypatch.setattr(files, "MOUNTS", folder / "none")
    assert files.file_system_of(str(folder)) == ""
