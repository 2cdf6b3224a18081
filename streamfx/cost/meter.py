"""Track a program operator by operator: which storages are live, and how many FLOPs were spent.

The same meter measures a real step and predicts one: under fake tensors nothing is computed, but the same code allocates,
shares, and frees tensors.
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
from streamfx.cost.comm import KINDS, traffic_of_call
from streamfx.cost.curve import Curve, Recorder
from streamfx.cost.flops import arguments_by_name, flops_of, is_fused_attention
from streamfx.cost.fusion import Fusion, is_fusible
from streamfx.cost.kernels import by_kernel, bytes_of_total, find_total
from streamfx.cost.max_rows import run_with_max_rows
from streamfx.cost.nested_tensors import tensors_in
from streamfx.cost.work import Work
from streamfx.cost.workspaces import TRACED_OPERATORS, allocation_size, workspace_of
from streamfx.dialect.offload import from_host, to_host
from streamfx.kernels.device_kinds import DeviceKind, device_kind
from streamfx.torch_private import FakeTensorMode, HigherOrderOperator, OpOverload, TorchDispatchMode


@dataclass
class Delta:
    """The increase of the live bytes above a base, at its peak: in all, and by category (`terms`)."""

    peak: int = 0
    terms: dict[str, int] = field(default_factory=dict)


ADDS_ROWS = (torch.ops.aten.index_add_.default, torch.ops.aten.scatter_.src)  # the last argument
COPIES = torch.ops.aten.copy_.default
ALLOCATIONS = {
    getattr(torch.ops.aten, name) for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
}
CLONES_MEMORY = {  # copies all memory of the first operand; the results that a fake tensor mode caches have less
    getattr(torch.ops.aten, name)
    for name in ("slice_scatter", "select_scatter", "diagonal_scatter", "as_strided_scatter", "copy")
}
READS_DEVICE = torch.ops.prim.device.default
# copies run in parallel with the device's work: `tools/planner/overlap.py` computes the time that they add
HOST_COPIES = (to_host, from_host)


class Meter(TorchDispatchMode):
    """Counts the work and the memory of operators that run inside it; tensors from outside do not count.

    `live` and `peak` are the current and peak bytes of storages. `work` holds all counters. `flops` are the FLOPs of
    products and attention; `attention_flops` of fused attention; `masked_flops` of fused attention without a causal flag,
    where a mask may hide some; `moved` are the bytes that operators without FLOPs read and write. Bytes count under the
    name in `term` at their allocation; `peak_terms` has the bytes of the peak by category. A `recorder` gets a point whenever
    bytes are allocated or freed.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        """Start with all counters at zero; `_sizes` maps a live storage to its bytes and its category."""
        super().__init__()
        self.live = self.peak = 0
        self.work = Work()
        self.term = "other"
        self.live_terms: Counter[str] = Counter()
        self.peak_terms: dict[str, int] = {}
        self.recorder: Recorder | None = None
        self._sizes: dict[int, tuple[int, str]] = {}
        self._fusion = Fusion()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Track compiled code when it runs, but not while it is traced."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run an operator, and count its work, the storages that it allocates, and its workspace."""
        kwargs = kwargs or {}
        if func is READS_DEVICE:  # not work; autograd may call it any number of times
            return args[0].device
        out = run_with_max_rows(func, args, kwargs)
        self._count(func, args, kwargs, out)
        if func is not to_host:  # values on the host use no device memory
            min_bytes = self._size_of(args[0]) if getattr(func, "overloadpacket", None) in CLONES_MEMORY else 0
            self._count_new(out, (args, kwargs), STAGE_INPUTS if func is from_host else self.term, min_bytes)
        if workspace := traced_workspace(func, args, kwargs) if func in TRACED_OPERATORS else workspace_of(func, args, kwargs):
            self.add_peak(Delta(workspace, {self.term: workspace}))
        return out

    def restart_peak(self) -> int:
        """Return the peak so far, and restart it at the live bytes."""
        peak, self.peak, self.peak_terms = self.peak, self.live, dict(self.live_terms)
        return peak

    def add_peak(self, rise: Delta) -> None:
        """Count bytes that were allocated above the live bytes, and have been freed: they may raise the peak."""
        self._record_point(rise.terms)
        self._record_point()
        if self.live + rise.peak > self.peak:
            self.peak = self.live + rise.peak
            self.peak_terms = {name: self.live_terms[name] + rise.terms.get(name, 0) for name in {*self.live_terms, *rise.terms}}

    def take_curve(self, begin: Work) -> Curve:
        """Return the curve recorded since the work `begin`, and restart the recorder; an empty curve without a recorder."""
        return Curve() if self.recorder is None else self.recorder.take_curve(begin, self.work)

    @contextmanager
    def separate_recorder(self) -> Iterator[Recorder | None]:
        """Send the points of the code inside to a separate recorder, and yield it; yield None if nothing is recorded."""
        outer_recorder = self.recorder
        self.recorder = None if outer_recorder is None else Recorder()
        self._record_point()
        try:
            yield self.recorder
        finally:
            self.recorder = outer_recorder

    def _record_point(self, rise: Mapping[str, int] = MappingProxyType({})) -> None:
        """Record a point with the live bytes by category, plus `rise`, if there is a recorder."""
        if self.recorder is not None:
            self.recorder.record(self.work, self.live_terms, rise)

    @contextmanager
    def measure_delta(self) -> Iterator[Delta]:
        """Yield a `Delta`; at the end it holds the peak of the code inside, relative to the live bytes at its start."""
        rise, peak_before, terms_at_start = Delta(), (self.peak, self.peak_terms), Counter(self.live_terms)
        base = self.live
        self.restart_peak()
        yield rise
        rise.peak = self.peak - base
        rise.terms = {
            name: difference
            for name in {*self.peak_terms, *terms_at_start}
            if (difference := self.peak_terms.get(name, 0) - terms_at_start[name])
        }
        if peak_before[0] >= self.peak:
            self.peak, self.peak_terms = peak_before

    @property
    def flops(self) -> int:
        """The FLOPs so far."""
        return self.work.flops

    @property
    def moved(self) -> int:
        """The bytes moved so far by operators without FLOPs."""
        return self.work.moved

    def rename(self, tensor: Tensor, term: str) -> None:
        """Count a live tensor's memory under another category from now on."""
        key = tensor.untyped_storage()._cdata
        if key in self._sizes:
            size, old_term = self._sizes[key]
            self._sizes[key] = size, term
            self.live_terms[old_term] -= size
            self.live_terms[term] += size
            self._record_point()

    @contextmanager
    def named(self, term: str) -> Iterator[None]:
        """Count storages that are allocated inside this context under a category."""
        outer_term, self.term = self.term, term
        try:
            yield
        finally:
            self.term = outer_term

    def with_term(self, term: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that the storages that it allocates count under a category."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self.named(term):
                return function(*args, **kwargs)

        return run

    def _count(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        """Add the work of an operator call to the counters; views and uninitialized results count nothing."""
        if isinstance(func, HigherOrderOperator):  # an operator in its arguments may be called, with a random state for example
            inner = next((i for i, argument in enumerate(args) if isinstance(argument, OpOverload)), None)
            if inner is None:
                return
            func, args = args[inner], args[inner + 1 :]
        if getattr(func, "is_view", False) or getattr(func, "overloadpacket", None) in ALLOCATIONS:
            return
        work = _work_of(func, args, kwargs, out)
        fused_bytes, num_kernels = self._fusion.run_operator(func, (args, kwargs), out)
        if not is_fusible(func):
            fused_bytes, num_kernels = fused_bytes + work.moved, num_kernels + work.launches
        self.work = self.work.plus(work._replace(fused=fused_bytes, kernels=num_kernels))

    def flush(self) -> None:
        """Count the bytes that fused kernels write for values that are still referenced."""
        fused_bytes, num_kernels = self._fusion.flush()
        self.work = self.work._replace(fused=self.work.fused + fused_bytes, kernels=self.work.kernels + num_kernels)

    def _size_of(self, tensor: Tensor) -> int:
        """Return the bytes of the memory in which a tensor lies; 0 if its elements overlap."""
        if 0 in tensor.stride():
            return 0
        storage = tensor.untyped_storage()
        return self._sizes.get(storage._cdata, (storage.nbytes(), ""))[0]

    def _count_new(self, out: Any, arguments: Any, term: str, min_bytes: int = 0) -> None:
        """Count result storages that are neither known nor operands, at `min_bytes` bytes each, until they are freed."""
        new = {key: (storage, device) for key, storage, device in _storages(out) if key not in self._sizes}
        if not new:
            return
        operand_keys = {key for key, *_ in _storages(arguments)}
        for key, (storage, device) in new.items():
            if key not in operand_keys:
                size = allocation_size(max(storage.nbytes(), min_bytes) if storage.nbytes() else 0, device)
                self._sizes[key] = size, term
                self.live += size
                self.live_terms[term] += size
                weakref.finalize(storage, self._count_freed, key)
        self._record_point()
        if self.live > self.peak:
            self.peak, self.peak_terms = self.live, dict(self.live_terms)

    def _count_freed(self, key: int) -> None:
        """Subtract a freed storage from the live bytes."""
        size, term = self._sizes.pop(key)
        self.live -= size
        self.live_terms[term] -= size
        self._record_point()


def traced_workspace(target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return the workspace of an operator that calls other operators: their peak bytes, except its operands and results."""
    arguments = arguments_by_name(target, args, kwargs)
    device = next(value.device for value in arguments.values() if isinstance(value, Tensor))
    return _cached_workspace(target, tuple((name, layout_of(value)) for name, value in arguments.items()), device_kind(device))


class TensorLayout(NamedTuple):
    """The properties of a tensor on which the cost of an operator depends."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def allocate(self) -> Tensor:
        """Allocate a tensor with this layout."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


def layout_of(value: Any) -> Any:
    """Return the layout of a tensor; any other value unchanged."""
    if not isinstance(value, Tensor):
        return value
    return TensorLayout(tuple(map(int, value.shape)), tuple(map(int, value.stride())), value.dtype, value.device)


@lru_cache(maxsize=1024)
def _cached_workspace(target: OpOverload, arguments: tuple[tuple[str, Any], ...], kind: DeviceKind) -> int:
    """Run the operators that `target` calls on fake tensors; return their peak bytes minus the bytes of the results."""
    with FakeTensorMode():
        fake_arguments = {name: value.allocate() if isinstance(value, TensorLayout) else value for name, value in arguments}
        results = sum(allocation_size(storage.nbytes(), device) for _, storage, device in _storages(target(**fake_arguments)))
        with Meter() as meter:
            fake_results = TRACED_OPERATORS[target](**fake_arguments)
            del fake_results
    return max(meter.peak - results, 0)


def _work_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Work:
    """Return the work of one operator call: attention, collective, product, in-place sum, or a move of bytes."""
    if func in HOST_COPIES:
        return Work()
    flops = flops_of(func, args, kwargs, out)
    if is_fused_attention(func):
        arguments = arguments_by_name(func, args, kwargs)
        is_masked_by_flag = arguments.get("is_causal") or "left" in arguments
        return Work(
            flops, 0, flops, 1, masked_flops=0 if is_masked_by_flag else flops, **by_kernel(func.name(), arguments, flops)
        )
    bytes_moved = _bytes_moved(func, args, kwargs, out)
    if (sent := traffic_of_call(func, args, kwargs, out)) is not None:
        bytes_field = dict(zip(KINDS, ("gathered", "reduced", "exchanged"), strict=True))[sent.kind]
        calls, sent_bytes, far_bytes = sent.traffic
        return Work(moved=bytes_moved, launches=1, **{sent.kind: calls, bytes_field: sent_bytes, f"{bytes_field}_far": far_bytes})
    if not flops:
        return Work(0, bytes_moved, 0, 1)
    if (total := find_total(func, args, kwargs)) is None:
        return Work(flops, 0, 0, 1, bytes_moved)
    bytes_read = sum(value.nbytes for value in tensors_in((args, kwargs)) if value is not total)
    total_bytes = bytes_of_total(func, args, total)
    return Work(flops, 0, 0, 1, bytes_read + total_bytes, total_bytes)


def _bytes_moved(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int:
    """Return the bytes that an operator reads and writes. An added row counts three times: two reads and a write."""
    if func in ADDS_ROWS:
        return 3 * args[-1].nbytes if isinstance(args[-1], Tensor) else 0
    operands = args[1:] if func is COPIES else args
    return sum(value.nbytes for value in tensors_in((operands, kwargs, out)))


def _storages(values: Any) -> Iterator[tuple[int, torch.UntypedStorage, torch.device]]:
    """Yield storages with the device of their tensor: a fake tensor's storage reports another one. Skip meta tensors."""
    for value in tensors_in(values):
        if value.device.type != "meta":
            storage = value.untyped_storage()
            yield storage._cdata, storage, value.device
