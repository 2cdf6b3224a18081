"""What the checks of the benchmark for one GPU compute where only a GPU runs them."""

from __future__ import annotations

import doctest
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.gpu import attention_rates, longest, measures, steps
from benchmarks.gpu.baselines import WAYS
from benchmarks.gpu.place import Place
from benchmarks.gpu.worker import why_retire
from tests.support.spread import only


@pytest.mark.parametrize("name", only(["cuDNN"], ["FA2, one call", "FA2, two calls", "cuDNN"]))
@pytest.mark.parametrize("keys", [128, 384])
def test_calls_of_kernels_fit_their_schemas(name: str, keys: int) -> None:
    """On the meta device: no numbers, but each operator takes its arguments, and results have the shapes of eager's."""
    kernel = attention_rates.Kernel
    flash, cudnn = (
        kernel(attention_rates._flash_forward, attention_rates._flash_backward),
        kernel(attention_rates._cudnn_forward, attention_rates._cudnn_backward),
    )
    ways = {
        "FA2, one call": attention_rates.one_call(flash),
        "FA2, two calls": attention_rates.two_calls(flash),
        "cuDNN": attention_rates.two_calls(cudnn),
    }
    query, gradient = (torch.empty(1, 4, 128, 64, device="meta", dtype=torch.bfloat16) for _ in range(2))
    key, value = (torch.empty(1, 2, keys, 64, device="meta", dtype=torch.bfloat16) for _ in range(2))
    out, more = ways[name].forward(query, key, value)
    assert out.shape == query.shape and more[0].shape == query.shape[:3]
    found = ways[name].backward(gradient, query, key, value, out, more)
    assert [item.shape for item in found] == [query.shape, key.shape, value.shape]


CUDA: dict[str, Any] = {
    "synchronize": None,
    "empty_cache": None,
    "reset_peak_memory_stats": None,
    "set_per_process_memory_fraction": None,
    "set_sync_debug_mode": None,
    "memory_allocated": 5 << 30,
    "max_memory_allocated": 7 << 30,
    "max_memory_reserved": 8 << 30,
    "memory_stats": {"num_alloc_retries": 2, "num_ooms": 1},
    "get_device_name": "NVIDIA H100 80GB HBM3",
    "get_device_properties": SimpleNamespace(total_memory=80 << 30),
}


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> dict[str, mock.Mock]:
    """Code for CUDA runs on a CPU: functions of torch.cuda, with their own signatures, return prepared values."""
    functions = {name: mock.create_autospec(getattr(torch.cuda, name), return_value=value) for name, value in CUDA.items()}
    for name, function in functions.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(Place, "has_cuda", True)
    monkeypatch.setattr(measures, "profile", Profiled)
    return functions


class Profiled:
    """A profiler that saw two kernels, which overlap, a copy, and a call of the host, all within a millisecond."""

    def __init__(self, activities: Any) -> None:
        self.profiler = SimpleNamespace(kineto_results=SimpleNamespace(events=self.events))

    def __enter__(self) -> Profiled:
        return self

    def __exit__(self, *_: object) -> None: ...

    def events(self) -> list[Any]:
        seen = [("CUDA", "gemm", 0, 600), ("CUDA", "add", 400, 600), ("CUDA", "Memcpy DtoH (Device -> Pinned)", 0, 10**9)]
        return [self.event(*one) for one in [*seen, ("CPU", "cudaLaunchKernel", 0, 10**9)]]

    def event(self, kind: str, name: str, start: int, duration: int) -> Any:
        values = {"name": name, "start_ns": start, "duration_ns": duration, "device_type": SimpleNamespace(name=kind)}
        return SimpleNamespace(**{key: (lambda value=value: value) for key, value in values.items()})


@contextmanager
def plain(model: Any, compiler: str) -> Iterator[Any]:
    """A way to run a step that compiles nothing."""
    yield lambda ids: model.lm_head.weight.float().square().mean()


@contextmanager
def too_large(model: Any, compiler: str) -> Iterator[Any]:
    def loss(ids: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 19.90 GiB.")

    yield loss


def test_a_step_on_a_gpu_has_all_figures(pretended: dict[str, mock.Mock], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WAYS, "plain", plain)
    found = {name: value for finding in steps.step(Place("cpu", True), "plain", 8192) for name, value in finding.figures.items()}
    assert (found["peak GiB"], found["reserved GiB"], found["retries"], found["out of memory"]) == (7.0, 8.0, 0, 0)
    assert found["launches"] == 2 and 0 < found["idle %"] < 100 and found["host waits"] == 0
    assert steps.card_of(Place("cpu", True)) == "H100"


def test_a_step_that_needs_too_much_memory_is_a_result(pretended: dict[str, mock.Mock], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WAYS, "too large", too_large)
    (finding,) = steps.step(Place("cpu", True), "too large", 8192)
    assert "Tried to allocate 19.90 GiB" in finding.figures["does not fit"] and not finding.off


def test_a_cap_is_lifted_and_nothing_is_kept(pretended: dict[str, mock.Mock]) -> None:
    place = Place("cpu", True)
    with longest.capped(place, 16 << 30):
        place.share("a model", dict)
    assert not place.kept
    assert [call.args for call in pretended["set_per_process_memory_fraction"].call_args_list] == [(0.2,), (1.0,)]


def test_memory_that_a_check_leaves_ends_its_worker(pretended: dict[str, mock.Mock]) -> None:
    assert why_retire(Place("cpu", True)) == "5.00 GiB are left of the check"
    pretended["synchronize"].side_effect = RuntimeError("CUDA error: an illegal memory access was encountered")
    assert "the device is unusable: RuntimeError: CUDA error: an illegal memory" in why_retire(Place("cpu", True))


@pytest.mark.parametrize("module", ["table", "measures", "kernels"])
def test_examples_in_docstrings_hold(module: str) -> None:
    found = doctest.testmod(importlib.import_module(f"benchmarks.gpu.{module}"))
    assert found.attempted and not found.failed
