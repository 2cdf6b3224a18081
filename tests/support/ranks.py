"""Runs a function on several processes that talk by gloo, with a time limit."""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessRaisedException, start_processes

LIMIT = 60.0  # seconds that a rank waits for others
ALL = 240.0  # seconds, on a machine that does other things


class RankFailed(Exception):
    """A process raised an error, or did not end in time."""


def on_ranks(function: Callable[..., Any], *arguments: Any, world: int = 2) -> list[Any]:
    """`function(rank, *arguments)` of each rank, all at once; the process group is there when it is called."""
    with tempfile.TemporaryDirectory() as folder:
        processes = start_processes(_run, (world, folder, function, arguments), nprocs=world, join=False, start_method="spawn")
        end = time.monotonic() + ALL
        try:
            while not processes.join(timeout=0.2):
                if time.monotonic() > end:
                    raise RankFailed(f"not all of {world} ranks have ended after {ALL} seconds")
        except ProcessRaisedException as error:
            raise RankFailed(str(error)) from None
        finally:
            for process in processes.processes:
                process.kill()
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world)]


def _run(rank: int, world: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    address = f"file://{folder}/store"  # no port, which another process might take
    wait = timedelta(seconds=LIMIT)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world, timeout=wait)
    try:
        torch.save(function(rank, *arguments), f"{folder}/{rank}.pt")
    except Exception:
        traceback.print_exc()
        raise
    finally:
        dist.destroy_process_group()
