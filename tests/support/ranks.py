"""Runs a function on several processes that talk by gloo, with a time limit.

The processes are forked from one that has imported torch and compiled a model (`ranks_begin.py`), and that lives as long as the
process that runs the tests: calls share this cost, and no call sees the state of another.
"""

import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException, start_processes

BEGIN = "tests.support.ranks_begin"  # imported by the process that all ranks are forked from
LIMIT = 60.0  # seconds that a rank waits for others
ALL = 240.0  # seconds, on a machine that does other things


class RankFailed(Exception):
    """A process raised an error, or did not end in time."""


def on_ranks(function: Callable[..., Any], *arguments: Any, world: int = 2, limit: float = ALL) -> list[Any]:
    """`function(rank, *arguments)` of each rank, all at once; the process group is there when it is called."""
    multiprocessing.set_forkserver_preload([BEGIN])
    with tempfile.TemporaryDirectory() as folder:
        given = (world, folder, function, arguments)
        processes = start_processes(_run, given, nprocs=world, join=False, start_method="forkserver")
        end = time.monotonic() + limit
        try:
            while not processes.join(timeout=0.2):
                if time.monotonic() > end:
                    raise RankFailed(f"not all of {world} ranks have ended after {limit} seconds")
        except ProcessException as error:
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
    dist.barrier()  # a rank that ends at once would close a connection that another rank opens
    try:
        torch.save(function(rank, *arguments), f"{folder}/{rank}.pt")
    except Exception:
        traceback.print_exc()
        raise
    finally:
        dist.destroy_process_group()
