"""Values of the forward graph that wait for the backward graph in memory-mapped files, outside the process's memory.

Disk space is reserved before a file is written: without space, touching a mapped page would kill the process with a
signal instead of raising an error.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import operator
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from streamfx.budget import format_bytes
from streamfx.errors import OffloadSpaceError
from streamfx.kernels.process_limits import limit_of
from streamfx.log import log

IN_MEMORY = ("tmpfs", "ramfs")  # types of file systems
MOUNTS = Path("/proc/self/mounts")
BLOCK = 1 << 20  # bytes that one write reserves
NOT_ON_DISK = "offload writes to %s, which is in memory itself (%s): no memory is saved. Set TMPDIR to a folder on a disk."


def copy_to_file(value: Tensor) -> Tensor:
    """Copy a value to a memory-mapped file; return the mapped tensor, which is the file's only reference.

    Raises:
        OffloadSpaceError: if the disk has no space.
    """
    if not value.numel():
        return value.clone()
    with _new_file(value.nbytes) as path:
        held = torch.from_file(str(path), shared=True, size=value.numel(), dtype=value.dtype).view(value.shape)
    held.copy_(value)
    _drop_pages(held)
    return held


@contextlib.contextmanager
def _new_file(size: int) -> Iterator[Path]:
    """Context manager: create a file with `size` bytes reserved, yield its path, and unlink it on exit.

    Raises:
        OffloadSpaceError: if the disk has no space.
    """
    folder = "the folder for temporary files"
    try:
        folder = tempfile.gettempdir()
        _warn_of_memory(folder)
        with tempfile.NamedTemporaryFile(prefix="streamfx-", dir=folder, delete=False) as file:
            path = Path(file.name)
            try:
                _reserve(file.fileno(), size)
            except OSError:
                path.unlink()
                raise
    except OSError as error:
        raise _no_room(folder, size, error) from error
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):  # if a file in use cannot be deleted, it stays until the folder is emptied
            path.unlink()


def _reserve(file: int, size: int) -> None:
    """Reserve `size` bytes of disk space for an open file (by its descriptor), or raise `OSError`."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
        return
    for start in range(0, size, BLOCK):
        os.write(file, bytes(min(BLOCK, size - start)))


def _no_room(folder: str, size: int, cause: OSError) -> OffloadSpaceError:
    """Return the error for a value of `size` bytes that cannot be written to `folder`, with the cause and advice.

    It reports the free space only if the disk is full, and the process's limit only if that was exceeded.
    """
    free, limit = _free_bytes(folder), limit_of("RLIMIT_FSIZE") if cause.errno == errno.EFBIG else None
    details = f"; {format_bytes(free)} are free" if free is not None and cause.errno == errno.ENOSPC else ""
    details += "" if limit is None else f"; RLIMIT_FSIZE limits a file to {format_bytes(limit)}"
    advice = "set the environment variable TMPDIR to a folder on a disk with more space, or omit offload"
    error = OffloadSpaceError(
        "offload keeps values of stages in files",
        found=f"no space for {format_bytes(size)}: {cause.strerror or cause}{details}",
        where=folder,
        do=advice if limit is None else "raise the limit (`ulimit -f unlimited`), or omit offload",
    )
    error.folder, error.needed, error.free = folder, size, free
    return error


def _free_bytes(folder: str) -> int | None:
    """Return the free bytes on a folder's disk; None if the system does not report them."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


@cache
def _warn_of_memory(folder: str) -> None:
    """Warn once if a folder is in memory, so that its files occupy memory."""
    if (kind := file_system_of(folder)) in IN_MEMORY:
        log.warning(NOT_ON_DISK, folder, kind)


def file_system_of(folder: str) -> str:
    """Return the type of file system that a folder is on, for example "ext4"; "" if the system does not report it.

    It is the type of the innermost mount point that contains the folder.
    """
    try:
        lines = [line.split() for line in MOUNTS.read_text().splitlines()]
    except OSError:
        return ""
    resolved = Path(folder).resolve()
    ancestors = (resolved, *resolved.parents)
    mounts = [
        (len(mount_point.parts), kind)  # (depth, type of file system)
        for _, name, kind, *_ in lines
        if (mount_point := Path(_unescaped(name))) in ancestors
    ]
    return max(mounts, key=operator.itemgetter(0))[1] if mounts else ""


def _unescaped(name: str) -> str:
    r"""Decode a name from the system's list of mounts, in which spaces are \040."""
    return re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), name)


def _drop_pages(held: Tensor) -> None:
    """Drop a mapped tensor's pages from the process's memory, so that only the file holds them until they are read."""
    with contextlib.suppress(OSError, AttributeError):  # the system may have no such call
        ctypes.CDLL(None).madvise(ctypes.c_void_p(held.data_ptr()), ctypes.c_size_t(held.nbytes), mmap.MADV_DONTNEED)
