"""Offloaded values: in files on a CPU, copied without a race on a device."""

import errno
import gc
import logging
import mmap
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import streamfx
from streamfx.cost.memory import bytes_like, cost_of
from streamfx.ir.facts import Facts, known
from streamfx.ir.program import Program
from streamfx.options import SAVE_LEVELS, resolve_options
from streamfx.runtime import files
from streamfx.runtime.files import copy_to_file
from streamfx.runtime.offload import free_after_copy, wait_for_copy
from streamfx.runtime.outer import HostProgramRunner
from streamfx.tools.planner.overlap import bytes_on_host
from tests.support.exactness import TOLERANCE, assert_small, compare, value_errors
from tests.support.sharded import Layer
from tests.support.spread import only
from tests.support.stages import Layers, batch
from tests.support.streams import Device

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


# -- copies to and from the host, on a device that works later than the host asks

LAYERS = 5


PLANNED: dict[str, Any] = {"outputs": "dense", "chunk_size": 5, "loss_chunk_size": 5, "offload": "inputs"}


class Traced:
    """A decoder's graph, traced once, for many plans; options default to `PLANNED`."""

    def __init__(self, model: nn.Module, inputs: tuple[Tensor, ...] | None = None) -> None:
        (self.recorded,) = compare(model.double(), inputs or batch(), chunk_size=5).recorder.compilations
        self.truth, self.outputs = self.recorded.joint_values(), self.recorded.joint_arguments[1]
        self._facts: dict[str, Facts] = {}

    def facts(self, **options: Any) -> Facts:
        given = {**PLANNED, **options}
        if str(given) not in self._facts:
            self._facts[str(given)] = self.recorded.facts_for(resolve_options(given))
        return self._facts[str(given)]

    def program(self, **options: Any) -> Program:
        return known(self.facts(**options).program)

    def run(self, device: Device | None = None, **options: Any) -> None:
        """Both halves, on a device if one is given; their results are those of the traced graph."""
        program = self.program(**options)
        with nullcontext() if device is None else device.watching():
            actual = self.recorded.streamed_values(program)
        assert_small(value_errors(actual, self.truth, self.outputs), TOLERANCE, str(options))

    def forward(self) -> list[Any]:
        """Run the forward; return its saved values in the backward's order."""
        results = list(HostProgramRunner(self.program().forward)(list(known(self.recorded.primals))))
        return sorted(results[self.outputs :], key=lambda value: isinstance(value, Tensor))

    def backward(self, saved: list[Any]) -> None:
        gradients = HostProgramRunner(known(self.program().backward))([*saved, *known(self.recorded.tangents)])
        assert_small(value_errors(list(gradients), self.truth[self.outputs :], 0), TOLERANCE, "the backward half")


@pytest.fixture(scope="module")
def traced() -> Traced:
    found = Traced(Layers(LAYERS))
    found.program()  # before a device watches
    return found


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    device.install(monkeypatch)
    return device


ATTENTION = {"offload": "attention"}
PLANS: list[tuple[dict[str, Any], int]] = [({}, 2), ({"keep_every": 3}, 2), ({"chunk_size": 13}, 2), (ATTENTION, 6)]


@pytest.mark.parametrize(("options", "alive"), PLANS, ids=str)
def test_values_of_two_stages_are_alive_at_most(traced: Traced, device: Device, options: dict[str, Any], alive: int) -> None:
    """A stage saves its input; with `offload="attention"` also attention's results and their log-sum-exps."""
    traced.run(device, **options)
    device.check()
    assert 0 < device.most_alive() <= alive
    if not options:
        assert device.most_alive() == 2 and len(device.overlaps) == 2 * (LAYERS - 1)
    elif options is ATTENTION:
        assert device.runtime.most == bytes_on_host(traced.facts(**ATTENTION)) == mmap.PAGESIZE * (3 * LAYERS - 1)


def test_copies_overlap_the_loops_of_a_stage(traced: Traced, device: Device) -> None:
    """But for the first one of the backward half, whose value is needed at once."""
    traced.run(device)
    loops = min(device.overlaps[: LAYERS - 1])
    assert loops > 20
    assert [tasks >= loops for tasks in device.overlaps].count(False) == 1


class Skips(Layers):
    """Each layer reads the first stream, too."""

    def hidden(self, x: Tensor) -> Tensor:
        first = x = torch.tanh(x)
        for qkv, out in zip(self.qkv, self.out, strict=True):
            q, k, v = (part[:, None] for part in qkv(x).chunk(3, -1))
            x = x * first + out(F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])
        return x


@pytest.mark.compiled
def test_values_read_by_several_stages_are_copied_correctly(device: Device) -> None:
    """In forward they stay until their last reader; backward fetches them again after a gap."""
    Traced(Skips(LAYERS)).run(device)
    device.check()
    assert 2 <= device.most_alive() <= 4


def test_forwards_and_backwards_may_interleave(traced: Traced, device: Device) -> None:
    """A retained graph fetches its copies twice, during a second forward pass; a third forward pass has no backward."""
    with device.watching():
        saved = traced.forward()
        traced.backward(list(saved))
        other = traced.forward()
        traced.forward()
        traced.backward(saved)
        traced.backward(other)
    traced.run(device)
    device.check()


class Stopped(Exception):
    pass


@pytest.mark.parametrize("name", ["hidden_3_forward", "hidden_3_backward_0", "hidden_4_backward_1"])
def test_an_exception_leaves_the_next_step_correct(traced: Traced, device: Device, name: str) -> None:
    """Memory of copies that are under way is given to the next step only after them."""
    program = traced.program()
    half = program.forward if name.endswith("_forward") else known(program.backward)
    stopped = mock.patch.object(half.get_submodule(name), "forward", side_effect=Stopped)
    with device.watching(), stopped, pytest.raises(Stopped):
        traced.backward(traced.forward())
    gc.collect()  # the exception's frames, which hold the copies
    traced.run(device)
    device.check()


def test_several_threads_share_copies_without_a_race(traced: Traced, device: Device) -> None:
    """Each has a compute stream of its own; copies of all run on the one copy stream, in blocks that they share."""
    failed = list[BaseException]()

    def steps() -> None:
        try:
            for _ in range(2):
                with device.watching(device.Stream()):
                    traced.backward(traced.forward())
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=steps) for _ in range(2)]
    with device.watching():  # torch notes in a global that there are modes, which the first to begin has to be the last to leave
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failed
    assert len(device.streams) == 1 + 4 + 1
    device.check()


@pytest.mark.parametrize("packs", [False, True])
def test_saved_tensor_hooks_may_read_saved_values(traced: Traced, device: Device, packs: bool) -> None:
    """The host waits for copies before autograd gives them to hooks, and else for none."""
    with torch.autograd.graph.save_on_cpu() if packs else nullcontext(), device.watching():
        saved = traced.forward()
    held = device.runtime.registered
    assert len(held) == LAYERS - 1 < len(saved)
    assert all(device.is_done(address) is packs for address in held)


# -- attention's results wait on the host, too


def names_of(nodes: Iterable[Iterable[fx.Node]]) -> set[str]:
    return {node.name for node in chain(*nodes)}


@pytest.mark.parametrize("save", ["auto", SAVE_LEVELS[-1]])
def test_attention_runs_once_and_its_results_wait_on_the_host(traced: Traced, save: str) -> None:
    """FLOPs are those of the level of `save`; all that level "attention" keeps waits on the host, and all inputs, but not what
    higher levels keep.
    """
    level = "attention" if save == "auto" else save
    facts, later = traced.facts(offload="attention", save=save), traced.facts(offload="none", save=level)
    program, results = known(facts.program), names_of(traced.facts(offload="none", save="attention").plan.kept)
    assert len(results) == 2 * LAYERS and results <= names_of(later.plan.kept) == names_of(facts.plan.kept)

    on_host = [node for node in program.saved if node.target is free_after_copy]
    waiting = results | names_of(stage.outputs for stage in facts.stages[: LAYERS - 1])
    assert {node.meta["joint"] for node in on_host} == waiting and len(waiting) == 3 * LAYERS - 1
    assert {node.meta.get("joint") for node in program.saved if node not in on_host}.isdisjoint(waiting)

    costs = [cost_of(known(one.program).forward, known(one.program).backward, 1) for one in (facts, later)]
    assert (costs[0].flops, costs[0].work.attention_flops) == (costs[1].flops, costs[1].work.attention_flops)
    assert costs[1].held - costs[0].held == sum(bytes_like(node.meta["val"]) for node in on_host)


def test_each_run_fetches_the_values_that_it_reads(traced: Traced) -> None:
    """With `keep_every=3`, two loops that are not consecutive read results of attention."""
    graph = known(known(traced.facts(offload="attention", keep_every=3).program).backward).graph
    fetched = graph.find_nodes(op="call_function", target=wait_for_copy)
    held = [node.all_input_nodes[0].all_input_nodes[0] for node in fetched]
    assert len(held) > len(set(held))


OPTIONS: dict[str, Any] = {"save": "inputs", "offload": "attention"}
WAYS: dict[str, Callable[[], Any]] = {
    "one dictionary": lambda: streamfx.configure(options=OPTIONS),
    "options": lambda: streamfx.Options(**OPTIONS),
    "two places": lambda: resolve_options({"offload": "attention"}),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_save_level_that_keeps_no_attention_is_refused(way: str) -> None:
    words = r"(?s)save='inputs' keeps none.*do +omit save, or give offload='inputs'"
    with streamfx.configure(save="inputs"), pytest.raises(streamfx.OptionError, match=words):
        WAYS[way]()


def test_a_budget_is_searched_among_plans_that_keep_attention(traced: Traced) -> None:
    auto = {"chunk_size": "auto", "loss_chunk_size": "auto"}
    facts = traced.facts(offload="attention", memory_budget="1GiB", **auto)
    levels = [tried.candidate.save for tried in known(facts.search_trace).candidates]
    assert levels[0] == "attention" and len(levels) > 1, "what takes the least is found out first"
    assert names_of(facts.plan.kept) == names_of(traced.facts(save="products").plan.kept)


# -- a layer that is a graph of its own, as inside FSDP2's hooks


@pytest.mark.compiled
@pytest.mark.parametrize("needs_gradient", only([True], [True, False]))
def test_the_input_of_a_layer_waits_on_the_host(device: Device, needs_gradient: bool) -> None:
    """Only autograd keeps it. An input without a gradient (a table of positions) is the caller's, and stays where it is."""
    layer = Traced(Layer(8), (torch.randn(1, 13, 8, dtype=torch.float64, requires_grad=needs_gradient),))
    layer.run(device)
    device.check()
    assert len(device.overlaps) == 2 * needs_gradient
    assert bytes_on_host(layer.facts()) == mmap.PAGESIZE * needs_gradient
