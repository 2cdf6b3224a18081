"""Options that were set for a block are off outside of it: in other threads, and in whatever order blocks are left."""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading

import pytest
import torch
import torch.nn.functional as F

import streamfx
from streamfx import options
from streamfx.options import resolved
from streamfx.runtime.rng import draw_seed


@pytest.fixture(autouse=True)
def nothing_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "_of_process", [])


def test_blocks_left_in_another_order_than_entered() -> None:
    one, other = streamfx.configure(chunk_size=3), streamfx.configure(chunk_size=4, loss_chunk_size=5)
    one.__enter__()
    other.__enter__()
    one.__exit__()
    assert (resolved().chunk_size, resolved().loss_chunk_size) == (4, 5)
    other.__exit__()
    assert resolved() == options.Options()


def test_no_thread_sees_a_block_that_another_one_is_about_to_enter() -> None:
    """The call comes before the block: what lies between is nobody else's, either."""
    going, leaked = threading.Event(), list[object]()

    def watch() -> None:
        while not going.is_set():
            leaked.extend([size] if (size := resolved().chunk_size) != "auto" else [])

    worker, before = threading.Thread(target=watch), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        worker.start()
        for _ in range(300):
            with streamfx.configure(chunk_size=7):
                assert resolved().chunk_size == 7
    finally:
        sys.setswitchinterval(before)
        going.set()
        worker.join()
    assert leaked == []


def test_a_thread_waits_until_it_is_known_whether_a_block_follows() -> None:
    seen: list[object] = []
    block = streamfx.configure(chunk_size=7)
    worker = threading.Thread(target=lambda: seen.append(resolved().chunk_size))
    worker.start()
    worker.join(0.1)
    with block:
        worker.join()
    assert seen == ["auto"]


def test_a_call_is_for_the_process() -> None:
    """In other threads, too, whether or not its result is kept; until the result is used as a block."""
    seen: list[object] = []

    def look() -> None:
        worker = threading.Thread(target=lambda: seen.append((resolved().chunk_size, resolved().loss_chunk_size)))
        worker.start()
        worker.join()

    streamfx.configure(chunk_size=3)
    kept = streamfx.configure(loss_chunk_size=4)
    look()
    with kept:
        look()
        assert resolved().loss_chunk_size == 4
        assert resolved({"loss_chunk_size": 5}).loss_chunk_size == 5
    assert resolved().loss_chunk_size == "auto"
    assert seen == [(3, 4), (3, "auto")]


def test_tasks_have_blocks_of_their_own() -> None:
    async def task(size: int) -> list[object]:
        found = []
        with streamfx.configure(chunk_size=size):
            for _ in range(3):
                await asyncio.sleep(0)
                found.append(resolved().chunk_size)
        return [*found, resolved().chunk_size]

    async def both() -> list[list[object]]:
        return list(await asyncio.gather(task(3), task(4)))

    assert asyncio.run(both()) == [[3, 3, 3, "auto"], [4, 4, 4, "auto"]]


def test_a_block_that_is_left_in_another_context_is_off() -> None:
    block, context = streamfx.configure(chunk_size=3), contextvars.copy_context()
    context.run(block.__enter__)
    assert context.run(lambda: resolved().chunk_size) == 3
    block.__exit__()
    assert context.run(lambda: resolved().chunk_size) == "auto"


# -- what else a process sets: the default device


def test_seeds_are_drawn_on_the_cpu() -> None:
    """Whatever the default device is: the host reads them, and would wait for any other device."""
    x = torch.ones(2, 37, 8, dtype=torch.float64, requires_grad=True)
    function = torch.compile(lambda x: F.dropout(x * 1.0, 0.4), backend="streambp", options={"chunk_size": 5})
    with torch.device("meta"):
        assert draw_seed().device.type == "cpu"
        out = function(x)
        (gradient,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(gradient, out)
    torch.set_default_device("meta")
    try:
        (gradient,) = torch.autograd.grad((out := function(x)).sum(), x)
    finally:
        torch.set_default_device(None)
    assert torch.equal(gradient, out)
