"""Follows a program operator by operator: which storages are alive, and how many FLOPs have been spent.

The same meter measures a real step and predicts one: under fake tensors nothing is computed, but tensors are made, shared and
freed by the very same code.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from streamfx.cost.categories import STAGE_INPUTS
from streamfx.cost.comm import KINDS, sent_by
from streamfx.cost.curve import Curve, Recorder
from streamfx.cost.flops import arguments_by_name, flops_of, is_fused_attention
from streamfx.cost.fusion import Fusion, is_fusible
from streamfx.cost.inplace_accumulate import added_to, bytes_of_total
from streamfx.cost.kernels import by_kernel
from streamfx.cost.most_rows import with_most_rows
from streamfx.cost.nested_tensors import tensors_in
from streamfx.cost.work import Work
from streamfx.cost.workspaces import FOLLOWED, allocated, workspace_of
from streamfx.kernels.device_kinds import DeviceKind, kind_of
from streamfx.runtime.offload import from_host, to_host
from streamfx.torch_private import FakeTensorMode, HigherOrderOperator, OpOverload, TorchDispatchMode


@dataclass
class Delta:
    """How far the bytes alive rise above where they stood, and which terms are up at that moment."""

    peak: int = 0
    terms: dict[str, int] = field(default_factory=dict)


ADDS_ROWS = (torch.ops.aten.index_add_.default, torch.ops.aten.scatter_.src)  # the last argument
COPIES = torch.ops.aten.copy_.default
UNWRITTEN = {getattr(torch.ops.aten, name) for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")}
CLONES_MEMORY = {  # with all memory that the first operand lies in; what a fake tensor's cache makes of them has less
    getattr(torch.ops.aten, name)
    for name in ("slice_scatter", "select_scatter", "diagonal_scatter", "as_strided_scatter", "copy")
}
ASKS_DEVICE = torch.ops.prim.device.default
HOST_COPIES = (to_host, from_host)  # they run beside the work of the device: `tools/planner/overlap.py` says what they add


class Meter(TorchDispatchMode):
    """Counts what operators inside of it make, until it is freed; tensors from outside count nothing.

    `live` and `peak` are bytes of storages now and at most. `flops` are those of products and attention, `attention_flops` those
    of fused attention, and `masked_flops` those of them without a causal flag, of which a mask may hide some; `moved` are the
    bytes that operators without FLOPs read and write; all of these and more are in `work`. Bytes are counted under the name that
    `term` has when they are made; `peak_terms` are those of the peak. A `recorder` is told whenever bytes come or go.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.work = Work()
        self.watched_flops = self.watched_attention = 0
        self.term = "other"
        self.live_terms: Counter[str] = Counter()
        self.peak_terms: dict[str, int] = {}
        self.recorder: Recorder | None = None
        self._sizes: dict[int, tuple[int, str]] = {}
        self._fusion = Fusion()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """See what compiled code does when it runs, and nothing of its tracing."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is ASKS_DEVICE:  # no work: how often autograd asks is its own affair
            return args[0].device
        out = with_most_rows(func, args, kwargs)
        self._count(func, args, kwargs, out)
        if func is not to_host:  # what waits on the host is not in the device's memory
            least = self._size_of(args[0]) if getattr(func, "overloadpacket", None) in CLONES_MEMORY else 0
            self._note_new(out, (args, kwargs), STAGE_INPUTS if func is from_host else self.term, least)
        if workspace := followed(func, args, kwargs) if func in FOLLOWED else workspace_of(func, args, kwargs):
            self.reached(Delta(workspace, {self.term: workspace}))
        return out

    def restart_peak(self) -> int:
        """The peak so far; from now on the peak is counted from what is alive."""
        peak, self.peak, self.peak_terms = self.peak, self.live, dict(self.live_terms)
        return peak

    def reached(self, rise: Delta) -> None:
        """Bytes above those alive now that have been alive for a while."""
        self._note(rise.terms)
        self._note()
        if self.live + rise.peak > self.peak:
            self.peak = self.live + rise.peak
            self.peak_terms = {name: self.live_terms[name] + rise.terms.get(name, 0) for name in {*self.live_terms, *rise.terms}}

    def recorded(self, begin: Work) -> Curve:
        """What was told to the recorder since so much work was done; empty without one."""
        return Curve() if self.recorder is None else self.recorder.take(begin, self.work)

    @contextmanager
    def recorded_apart(self) -> Iterator[Recorder | None]:
        """What runs inside is told to a recorder of its own, if there is one at all."""
        own = self.recorder
        self.recorder = None if own is None else Recorder()
        self._note()
        try:
            yield self.recorder
        finally:
            self.recorder = own

    def _note(self, rise: Mapping[str, int] = MappingProxyType({})) -> None:
        if self.recorder is not None:
            self.recorder.note(self.work, self.live_terms, rise)

    @contextmanager
    def rising(self) -> Iterator[Delta]:
        """The rise of what runs inside; the peak goes on as if nobody had looked."""
        rise, before, terms = Delta(), (self.peak, self.peak_terms), Counter(self.live_terms)
        base = self.live
        self.restart_peak()
        yield rise
        rise.peak = self.peak - base
        rise.terms = {
            name: difference for name in {*self.peak_terms, *terms} if (difference := self.peak_terms.get(name, 0) - terms[name])
        }
        if before[0] >= self.peak:
            self.peak, self.peak_terms = before

    @property
    def flops(self) -> int:
        return self.work.flops

    @property
    def masked_flops(self) -> int:
        return self.work.masked_flops

    @property
    def moved(self) -> int:
        return self.work.moved

    @property
    def attention_flops(self) -> int:
        return self.work.attention_flops

    def watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose FLOPs are counted in `watched_flops` as well, and those of attention in `watched_attention`."""

        def run(*args: Any, **kwargs: Any) -> Any:
            flops, attention = self.flops, self.attention_flops
            out = function(*args, **kwargs)
            self.watched_flops += self.flops - flops
            self.watched_attention += self.attention_flops - attention
            return out

        return run

    def rename(self, tensor: Tensor, term: str) -> None:
        """Count a tensor's memory under another term from now on."""
        key = tensor.untyped_storage()._cdata
        if key in self._sizes:
            size, before = self._sizes[key]
            self._sizes[key] = size, term
            self.live_terms[before] -= size
            self.live_terms[term] += size
            self._note()

    def named(self, term: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose bytes are counted under a term."""

        def run(*args: Any, **kwargs: Any) -> Any:
            before, self.term = self.term, term
            try:
                return function(*args, **kwargs)
            finally:
                self.term = before

        return run

    def _count(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        if isinstance(func, HigherOrderOperator):  # it may be given an operator to call, with a random state, say
            inner = next((i for i, argument in enumerate(args) if isinstance(argument, OpOverload)), None)
            if inner is None:
                return
            func, args = args[inner], args[inner + 1 :]
        if getattr(func, "is_view", False) or getattr(func, "overloadpacket", None) in UNWRITTEN:
            return
        work = _work_of(func, args, kwargs, out)
        moved, kernels = self._fusion.follow(func, (args, kwargs), out)
        if not is_fusible(func):
            moved, kernels = moved + work.moved, kernels + work.launches
        self.work = self.work.plus(work._replace(fused=moved, kernels=kernels))

    def flush(self) -> None:
        """Count what fused kernels write of the values that somebody holds."""
        moved, kernels = self._fusion.flush()
        self.work = self.work._replace(fused=self.work.fused + moved, kernels=self.work.kernels + kernels)

    def _size_of(self, tensor: Tensor) -> int:
        """Bytes of the memory that a tensor lies in; of one whose elements share memory, those of its own."""
        if 0 in tensor.stride():
            return 0
        storage = tensor.untyped_storage()
        return self._sizes.get(storage._cdata, (storage.nbytes(), ""))[0]

    def _note_new(self, out: Any, arguments: Any, term: str, least: int = 0) -> None:
        made = {key: (storage, device) for key, storage, device in _storages(out) if key not in self._sizes}
        if not made:
            return
        before = {key for key, *_ in _storages(arguments)}
        for key, (storage, device) in made.items():
            if key not in before:
                size = allocated(max(storage.nbytes(), least) if storage.nbytes() else 0, device)
                self._sizes[key] = size, term
                self.live += size
                self.live_terms[term] += size
                weakref.finalize(storage, self._note_freed, key)
        self._note()
        if self.live > self.peak:
            self.peak, self.peak_terms = self.live, dict(self.live_terms)

    def _note_freed(self, key: int) -> None:
        size, term = self._sizes.pop(key)
        self.live -= size
        self.live_terms[term] -= size
        self._note()


def followed(target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """The workspace of an operator that calls others: what these have alive beside its operands and results, at most."""
    arguments = arguments_by_name(target, args, kwargs)
    device = next(value.device for value in arguments.values() if isinstance(value, Tensor))
    return _followed(target, tuple((name, _as_given(value)) for name, value in arguments.items()), kind_of(device))


class _Given(NamedTuple):
    """How a tensor lies in memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def made(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


def _as_given(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return _Given(tuple(map(int, value.shape)), tuple(map(int, value.stride())), value.dtype, value.device)


@lru_cache(maxsize=1024)
def _followed(target: OpOverload, arguments: tuple[tuple[str, Any], ...], kind: DeviceKind) -> int:
    with FakeTensorMode():
        given = {name: value.made() if isinstance(value, _Given) else value for name, value in arguments}
        results = sum(allocated(storage.nbytes(), device) for _, storage, device in _storages(target(**given)))
        with Meter() as meter:
            made = FOLLOWED[target](**given)
            del made
    return max(meter.peak - results, 0)


def _work_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Work:
    if func in HOST_COPIES:
        return Work()
    flops = flops_of(func, args, kwargs, out)
    if is_fused_attention(func):
        arguments = arguments_by_name(func, args, kwargs)
        hides = arguments.get("is_causal") or "left" in arguments
        return Work(flops, 0, flops, 1, masked_flops=0 if hides else flops, **by_kernel(func.name(), arguments, flops))
    moved = _moved(func, args, kwargs, out)
    if (sent := sent_by(func, args, kwargs, out)) is not None:
        name = dict(zip(KINDS, ("gathered", "reduced", "exchanged"), strict=True))[sent.kind]
        calls, size, far = sent.traffic
        return Work(moved=moved, launches=1, **{sent.kind: calls, name: size, f"{name}_far": far})
    if not flops:
        return Work(0, moved, 0, 1)
    if (total := added_to(func, args, kwargs)) is None:
        return Work(flops, 0, 0, 1, moved)
    read = sum(value.nbytes for value in tensors_in((args, kwargs)) if value is not total)
    added = bytes_of_total(func, args, total)
    return Work(flops, 0, 0, 1, read + added, added)


def _moved(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int:
    """Bytes that an operator reads and writes: of rows that it adds to others, these and those that it adds to."""
    if func in ADDS_ROWS:
        return 3 * args[-1].nbytes if isinstance(args[-1], Tensor) else 0
    read = args[1:] if func is COPIES else args
    return sum(value.nbytes for value in tensors_in((read, kwargs, out)))


def _storages(values: Any) -> Iterator[tuple[int, torch.UntypedStorage, torch.device]]:
    """With the device that a tensor says it is on, which that of a fake one's storage is not. On the meta device is no memory."""
    for value in tensors_in(values):
        if value.device.type != "meta":
            storage = value.untyped_storage()
            yield storage._cdata, storage, value.device
