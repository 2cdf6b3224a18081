"""A device that executes work later than the host submits it, in any order that streams and events allow.

Operators run at once, on a CPU. For each the device notes a task: which blocks of memory it reads and writes, and on which
stream. After the program has ended `check` executes the tasks in several orders, and raises `Race` if a task reads a block that
does not hold what the program meant, or if a block was freed while another stream might still touch it.

    device = Device()
    device.install(monkeypatch)      # streamfx copies to and from this device
    with device.watching():          # operators of this thread are tasks
        run()
    device.check()                   # no race in any order
    device.most_alive()              # offloaded values on the device at once

A block belongs to the stream that was current when it was allocated. It is free as soon as its tensor is dead on the host, as in
PyTorch's caching allocator, and the next tensor of its size on that stream gets it. After `record_stream` a block stays taken:
its event would have to be seen complete, and the host runs ahead of all events.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from streamfx.dialect.offload import from_host, to_host
from streamfx.runtime import offload

GIVEN = 0  # the content of memory that was there before the program
UNWRITTEN = -1  # the content of a new tensor, which has no meaning
COPY = torch.ops.aten.copy_.default
FACTORIES = ("aten::empty", "aten::new_empty")  # they write nothing


class Race(AssertionError):
    """A task has read other content than the program meant, or can never run."""


@dataclass(eq=False)
class Block:
    """Memory: of a stream, or, if it has none, of the host."""

    number: int
    size: int = 0
    stream: Queue | None = None
    is_recorded: bool = False  # by `record_stream`
    touched: list[tuple[Mark, Task]] = field(default_factory=list)  # since its allocation


@dataclass(frozen=True)
class Mark:
    """A place in a stream's queue: all tasks before it."""

    stream: Queue
    position: int


@dataclass(frozen=True)
class Task:
    name: str
    reads: tuple[tuple[Block, int], ...] = ()  # with the content that is meant
    writes: tuple[tuple[Block, int], ...] = ()
    needs: tuple[Mark, ...] = ()


@dataclass(eq=False)
class Queue:
    device: Device
    name: str
    tasks: list[Task] = field(default_factory=list)
    waited_for: dict[Queue, int] = field(default_factory=dict)  # of other streams, up to which place

    def wait_event(self, event: Event) -> None:
        if event.mark is not None:
            self.device.overlaps.append(sum(task.name != "wait" for task in self.tasks[event.before.get(self, 0) :]))
            self.device.ask(Task("wait", needs=(event.mark,)), self)

    def wait_stream(self, other: Queue) -> None:
        self.device.ask(Task("wait", needs=(other.mark(),)), self)

    def synchronize(self) -> None:
        self.device.host_waits(self.mark())

    def mark(self) -> Mark:
        return Mark(self, len(self.tasks))


@dataclass(eq=False)
class Event:
    device: Device
    mark: Mark | None = None
    before: dict[Queue, int] = field(default_factory=dict)  # how many tasks each stream had when it was recorded

    def record(self, stream: Queue) -> None:
        self.mark, self.before = stream.mark(), {other: len(other.tasks) for other in self.device.streams}

    def synchronize(self) -> None:
        if self.mark is not None:
            self.device.host_waits(self.mark)


@dataclass
class Life:
    """When a tensor's memory was allocated and freed, by the host's clock."""

    block: Block
    begin: int
    end: float = float("inf")
    is_offloaded: bool = False


NO_MEMORY, NOT_REGISTERED = 2, 713


@dataclass
class CudaRuntime:
    """Registers up to `limit` bytes; at `most` so many were. `registered` has the size of each range by its address, `refused`
    the sizes of others.
    """

    device: Device
    limit: float = float("inf")
    registered: dict[int, int] = field(default_factory=dict)
    refused: list[int] = field(default_factory=list)
    most: int = 0
    error: int = 0  # what the last call that failed has left: the next launch raises it

    def launch(self) -> None:
        error, self.error = self.error, 0
        if error:
            raise RuntimeError(f"CUDA error {error}, of an earlier call")

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert address % mmap.PAGESIZE == size % mmap.PAGESIZE == 0 and flags == 1
        assert all(address + size <= begin or begin + own <= address for begin, own in self.registered.items())
        if sum(self.registered.values()) + size > self.limit:
            self.refused.append(size)
            self.error = NO_MEMORY
            return NO_MEMORY
        self.registered[address] = size
        self.most = max(self.most, sum(self.registered.values()))
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        assert self.device.is_done(address), "a copy may still touch this memory"
        return 0 if self.registered.pop(address, 0) else NOT_REGISTERED


class Device:
    """A replacement for `torch.cuda` in `streamfx.runtime.offload`: streams, events, and the CUDA runtime.

    `overlaps`: for each event that a stream has waited for, the stream's own tasks since the event was recorded.
    """

    def __init__(self) -> None:
        self.streams: list[Queue] = []
        self.compute = self.Stream()
        self.overlaps: list[int] = []
        self.lives: dict[int, Life] = {}  # by storage
        self.ended: list[Life] = []
        self.runtime = CudaRuntime(self)
        self.too_early: list[str] = []  # blocks that were freed
        self._free: dict[tuple[Queue | None, int], list[Block]] = {}
        self._on_host: dict[int, Block] = {}  # by address
        self._content: dict[Block, int] = {}  # as the program means it by now
        self._known: tuple[Mark, ...] = ()  # marks that the host has waited for
        self._numbers, self._clock, self._lock = count(1), count(1), threading.RLock()
        self._current = threading.local()

    # -- the interface of torch.cuda

    def Stream(self, device: Any = None) -> Queue:
        self.streams.append(Queue(self, f"stream {len(self.streams)}"))
        return self.streams[-1]

    def Event(self) -> Event:
        return Event(self)

    def current_stream(self, device: Any = None) -> Queue:
        return getattr(self._current, "stream", self.compute)

    @contextmanager
    def stream(self, stream: Queue) -> Iterator[None]:
        before, self._current.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._current.stream = before

    def cudart(self) -> Any:
        return self.runtime

    def record_stream(self, tensor: Tensor, stream: Queue) -> None:
        if life := self.lives.get(tensor.untyped_storage()._cdata):
            life.block.is_recorded = True

    # -- work that the program submits

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let streamfx copy tensors of the CPU as it copies those of a CUDA device."""
        monkeypatch.setattr(offload, "STREAM_MODULES", {"cpu": self})
        monkeypatch.setattr(offload, "_streams", {})
        monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: self.record_stream(tensor, stream))

    @contextmanager
    def watching(self, stream: Queue | None = None) -> Iterator[None]:
        """Operators of this thread are tasks of a stream."""
        with self.stream(stream or self.compute), _Watch(self):
            yield

    def ask(self, task: Task, stream: Queue) -> None:
        with self._lock:
            stream.tasks.append(replace(task, needs=(*task.needs, *self._known)))
            for mark in stream.tasks[-1].needs:
                stream.waited_for[mark.stream] = max(stream.waited_for.get(mark.stream, 0), mark.position)
            for block, _ in (*task.reads, *task.writes):
                block.touched.append((stream.mark(), task))

    def host_waits(self, mark: Mark) -> None:
        with self._lock:
            self._known = (*self._known, mark)

    def operator(self, name: str, read: Sequence[Tensor], written: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        """Note a call of an operator: `written` are arguments that it writes to, `made` its results in new memory."""
        with self._lock:
            new = [self._take(tensor) for tensor in made]
            blocks = dict.fromkeys(map(self.block_of, (*read, *written)))
            meant = tuple((block, self._content[block]) for block in blocks if self._content[block] != UNWRITTEN)
            self._content |= dict.fromkeys(new, UNWRITTEN)
            targets = [] if name.startswith(FACTORIES) else [*map(self.block_of, written), *new]
            writes = tuple((block, next(self._numbers)) for block in dict.fromkeys(targets))
            self._content |= dict(writes)
            if writes:
                self.runtime.launch()
                self.ask(Task(name, meant, writes), self.current_stream())

    def block_of(self, tensor: Tensor) -> Block:
        storage = tensor.untyped_storage()
        if life := self.lives.get(storage._cdata):
            return life.block
        block = self._on_host.setdefault(storage.data_ptr(), Block(next(self._numbers), storage.nbytes()))
        self._content.setdefault(block, GIVEN)
        return block

    def offloaded(self, tensor: Tensor) -> None:
        """A tensor is one that waits on the host for a while."""
        if life := self.lives.get(tensor.untyped_storage()._cdata):
            life.is_offloaded = True

    def _take(self, tensor: Tensor) -> Block:
        storage, stream = tensor.untyped_storage(), self.current_stream()
        free = self._free.get((stream, storage.nbytes()))
        block = free.pop() if free else Block(next(self._numbers), storage.nbytes(), stream)
        block.touched.clear()
        self.lives[storage._cdata] = Life(block, next(self._clock))
        weakref.finalize(storage, self._give_back, storage._cdata).atexit = False
        return block

    def _give_back(self, key: int) -> None:
        with self._lock:
            life = self.lives.pop(key)
            self.ended.append(life)
            if not life.block.is_recorded:
                self._check_free(life.block)
                life.end = next(self._clock)
                self._free.setdefault((life.block.stream, life.block.size), []).append(life.block)

    def _check_free(self, block: Block) -> None:
        """Check that the block's stream has waited for all other streams that use the block."""
        assert block.stream is not None
        for place, task in block.touched:
            if place.stream is not block.stream and block.stream.waited_for.get(place.stream, 0) < place.position:
                self.too_early.append(f"block {block.number} was freed before {task.name} on {place.stream.name} had to be done")

    # -- results

    def most_alive(self) -> int:
        """How many offloaded values had memory on the device at once, at most."""
        lives = [life for life in (*self.ended, *self.lives.values()) if life.is_offloaded]
        return max((sum(other.begin <= life.begin < other.end for other in lives) for life in lives), default=0)

    def check(self, seeds: int = 3) -> None:
        """Execute all tasks: with each stream as late as the others allow, and in some random orders."""
        if self.too_early:
            raise Race("; ".join(self.too_early))
        for late in self.streams:
            self._execute(lambda ready, late=late: next((s for s in ready if s is not late), late))  # type: ignore[misc]
        for seed in range(seeds):
            self._execute(Random(seed).choice)

    def is_done(self, address: int) -> bool:
        """Whether the host knows that no task will touch memory of the host any more."""
        block = self._on_host.get(address)
        return all(
            any(mark.stream is stream and position < mark.position for mark in self._known)
            for stream in self.streams
            for position, task in enumerate(stream.tasks)
            if any(block is touched for touched, _ in (*task.reads, *task.writes))
        )

    def _execute(self, choose: Callable[[list[Queue]], Queue]) -> None:
        content: dict[Block, int] = {}
        done = dict.fromkeys(self.streams, 0)
        while any(done[stream] < len(stream.tasks) for stream in self.streams):
            ready = [stream for stream in self.streams if self._is_ready(stream, done)]
            if not ready:
                raise Race(f"no stream can go on: {[(stream.name, done[stream]) for stream in self.streams]}")
            stream = choose(ready)
            task = stream.tasks[done[stream]]
            done[stream] += 1
            for block, meant in task.reads:
                if (found := content.get(block, GIVEN)) != meant:
                    raise Race(f"{task.name} on {stream.name} finds {found} in block {block.number}, and not {meant}")
            content |= dict(task.writes)

    def _is_ready(self, stream: Queue, done: dict[Queue, int]) -> bool:
        if done[stream] == len(stream.tasks):
            return False
        return all(done[mark.stream] >= mark.position for mark in stream.tasks[done[stream]].needs)


class _Watch(TorchDispatchMode):
    """Report the operators of a thread to a device; copies to and from the host by their operators."""

    supports_higher_order_operators = True

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device, self.stream = device, device.current_stream()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in (to_host, from_host):
            with self:
                out = (offload._to_host if func is to_host else offload._from_host)(*args, **kwargs)
            self.device.offloaded(args[0] if func is to_host else out)
            return out
        if func is COPY and self.device.current_stream() is not self.stream:
            same = args[0].stride() == args[1].stride() == torch.empty_like(args[1]).stride()
            assert same, "a copy between two layouts, or of one with gaps, allocates memory on the copy stream"
        out = func(*args, **kwargs)
        schema = getattr(func, "_schema", None)
        if schema is None or schema.name == "aten::set_":  # of no work on a device
            return out
        given = tensors_in((args, kwargs))
        known = {item.untyped_storage()._cdata for item in given}
        names = {argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write}
        by_name = {**dict(zip((argument.name for argument in schema.arguments), args, strict=False)), **kwargs}
        written = tensors_in([value for name, value in by_name.items() if name in names])
        made = {item.untyped_storage()._cdata: item for item in tensors_in(out) if item.untyped_storage()._cdata not in known}
        made = {key: item for key, item in made.items() if key not in self.device.lives}
        self.device.operator(schema.name, given, written, list(made.values()))
        return out


def tensors_in(values: Any) -> list[Tensor]:
    return [item for item in tree_iter(values) if isinstance(item, Tensor)]
