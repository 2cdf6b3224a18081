"""Loop bodies compiled by Inductor: the same gradients as bodies that are interpreted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass

from streamfx.runtime import chunked_scans, compiled_segments
from streamfx.runtime.shape_families import Family, FamilyCode, any_size, single
from streamfx.torch_private import FakeTensorMode
from streamfx.torch_private.inductor import InductorFailedError, InductorMemoryError, inductor_runs
from streamfx.torch_private.symbolic_sizes import with_sizes
from tests.support import decoders, hf, layouts
from tests.support.exactness import compare
from tests.support.hf import LossOf, deep
from tests.support.small import Causal, tokens
from tests.support.spread import only
from tests.support.stretches import interpreted

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="Inductor needs a C++ compiler")


@pytest.fixture
def forms(monkeypatch: pytest.MonkeyPatch) -> dict[Any, list[FamilyCode]]:
    """What a test compiles."""
    found: dict[Any, list[FamilyCode]] = {}
    monkeypatch.setattr(compiled_segments, "_forms", found)
    return found


@pytest.fixture
def interpreted_forms() -> Iterator[dict[Any, list[FamilyCode]]]:
    """What a test would compile, with the interpreter in the place of compiled code."""
    with interpreted() as found:
        yield found


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("streamfx")]


@needs_compiler
def test_small_decoder(forms: dict[Any, list[FamilyCode]], caplog: pytest.LogCaptureFixture) -> None:
    """Chunks of two sizes: the last one is shorter, and there is one form of each stretch for both."""
    model, ids = Causal().double(), tokens(2, 11)
    compare(model, (ids, ids), chunk_size=4, bodies="inductor", attention={"causal"}, streams=True)
    assert [len(own) for own in forms.values()] == [1] * len(forms)
    assert all(form.family.at is not None for own in forms.values() for form in own)
    assert not said(caplog)


@pytest.mark.parametrize("length", only([29], [32, 29]))
def test_layers_and_chunks_share_what_is_compiled(length: int, interpreted_forms: dict[Any, list[FamilyCode]]) -> None:
    """Four bodies at any depth (a layer, its keys and values again, its gradient, the head), which are six stretches; equal loops
    have the same ones.
    """
    ids = torch.randint(1, hf.VOCABULARY, (1, length))
    compiled = []
    for layers in (2, 3):
        torch._dynamo.reset()
        model, inputs = LossOf(deep(hf.qwen3, layers)), {"input_ids": ids, "labels": ids}
        report = compare(model, inputs, chunk_size=8, loss_chunk_size=8, bodies="inductor")
        loops = report.facts[0].program.loops  # type: ignore[union-attr]
        assert len({tuple(segment.structure for segment in loop.compiled.segments) for loop in loops}) == 4
        compiled.append(sum(map(len, interpreted_forms.values())))
        same = Counter(tuple(map(id, loop.compiled.segments)) for loop in loops)
        assert max(same.values()) == layers - 1
    assert compiled == [6, 6]


def test_sequences_of_any_length_share_what_is_compiled(interpreted_forms: dict[Any, list[FamilyCode]]) -> None:
    """One chunk each: a form for the first length, and one for all from the second on."""
    model = Causal().double()
    run = torch.compile(model, backend="streambp", dynamic=True, options={"chunk_size": 64, "bodies": "inductor"})
    for number, length in enumerate((8, 9, 12, 20)):
        run(tokens(2, length), tokens(2, length)).backward()
        assert {len(own) for own in interpreted_forms.values()} == {min(1 + number, 2)}


def test_what_does_not_compile_is_interpreted(
    forms: dict[Any, list[FamilyCode]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(compiled_segments, "compile_for_sizes", fails)
    monkeypatch.setattr(compiled_segments, "_told", set())
    model, ids = Causal().double(), tokens(2, 11)
    compare(model, (ids, ids), chunk_size=4, bodies="inductor")
    assert ["no compiler here" in text for text in said(caplog)] == [True]


def test_a_failure_of_ours_is_not_called_inductors(
    forms: dict[Any, list[FamilyCode]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> Any:
        raise KeyError(1024)

    monkeypatch.setattr(compiled_segments, "shapes_for", fails)
    monkeypatch.setattr(compiled_segments, "_told", set())
    model, ids = Causal().double(), tokens(2, 11)
    compare(model, (ids, ids), chunk_size=4, bodies="inductor")
    assert "streamfx failed (KeyError: 1024; please report this)" in said(caplog)[0]
    assert "Inductor" not in said(caplog)[0]


OUT_OF_MEMORY = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.20 GiB."),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    MemoryError(),
)
OTHERS = (RuntimeError("out of resource: shared memory, Required: 262144, Hardware limit: 232448"), KeyError("memory"))


@pytest.mark.parametrize("error", [*OUT_OF_MEMORY, *OTHERS], ids=repr)
def test_errors_that_say_that_memory_ran_out(error: Exception) -> None:
    """Inductor's own errors wrap them."""
    with pytest.raises(InductorFailedError) as raised, inductor_runs():
        raise RuntimeError("backend='inductor' raised") from error
    assert isinstance(raised.value, InductorMemoryError) == (error in OUT_OF_MEMORY)


@pytest.mark.parametrize(("failures", "attempts"), [(1, [1]), (2, [1, 3]), (9, [1, 3, 7, 15, 31])])
def test_a_body_is_compiled_when_memory_is_free_again(
    failures: int,
    attempts: list[int],
    forms: dict[Any, list[FamilyCode]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It runs eagerly between attempts, which become rare. An attempt has two tries, the second with an empty allocator cache."""
    tries = 0

    def compiles_if_there_is_room(module: fx.GraphModule, *_: Any, **__: Any) -> Any:
        nonlocal tries
        tries += 1
        if tries <= failures:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return module.forward

    monkeypatch.setattr("torch._inductor.standalone_compile", compiles_if_there_is_room)
    monkeypatch.setattr(compiled_segments, "_told", set())
    segment, x, found = compiled_segments.Segment(fx.symbolic_trace(lambda x: (x + 1,))), torch.randn(4, 3), []
    segment._pause = compiled_segments.CompilePause(length=2)
    for call in range(1, 70):
        before = tries
        assert torch.equal(segment(x)[0], x + 1)
        found += [call] if tries > before else []
    assert found == attempts
    assert [isinstance(form.run, fx.GraphModule) for own in forms.values() for form in own] == [False]
    assert ["memory ran out" in text for text in said(caplog)] == [True] * (failures > 1)


def test_memory_that_runs_out_in_a_first_call_is_an_error_of_that_step(
    forms: dict[Any, list[FamilyCode]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step runs the compiled body: nothing is left of the first one."""
    is_short = [True]

    def runs_if_there_is_room(graph: fx.GraphModule, like: int, shapes: Any) -> Any:
        def run(*given: Any) -> Any:
            if is_short.pop():
                raise torch.OutOfMemoryError("CUDA out of memory")
            is_short.append(False)
            return graph(*given)

        return run, any_size

    monkeypatch.setattr(compiled_segments, "compile_for_sizes", runs_if_there_is_room)
    model, ids = Causal().double(), tokens(2, 11)
    with pytest.raises(torch.OutOfMemoryError):
        torch.compile(model, backend="streambp", options={"chunk_size": 4, "bodies": "inductor"})(ids, ids).backward()
    model.zero_grad()
    is_short.append(False)
    compare(model, (ids, ids), chunk_size=4, bodies="inductor")
    assert forms and not any(isinstance(form.run, fx.GraphModule) for own in forms.values() for form in own)


class Settings(CustomGraphPass):
    """Notes Inductor's settings as it compiles a graph."""

    def __init__(self) -> None:
        self.found: list[tuple[Any, ...]] = []

    def __call__(self, graph: fx.Graph) -> None:
        triton = inductor_config.triton
        self.found.append((triton.cudagraphs, triton.autotune_at_compile_time, triton.unique_kernel_names))

    def uuid(self) -> Any:
        return None  # no cache: each graph is compiled


@needs_compiler
def test_settings_of_bodies() -> None:
    """A replayed CUDA graph overwrites results of other chunks, and tuning ahead takes memory that no plan counts."""
    noted = Settings()
    user = {"triton.cudagraphs": True, "triton.unique_kernel_names": False, "post_grad_custom_pre_pass": noted}
    x, family = torch.randn(4, 3), Family((1, 0, 0, 0), (0, 3, 3, 1), 0)
    with inductor_config.patch(user):
        for own in (family, single((4, 3, 3, 1))):
            form = compiled_segments.compiled(fx.symbolic_trace(lambda x: (x + 1,)), own, (4, 3, 3, 1), [x])
            assert not isinstance(form.run, fx.GraphModule)
    assert noted.found == [(False, None, False)] * 2


def as_number(n: Any) -> None:
    assert int(n) == 32


def as_eights(n: Any) -> None:
    assert n % 8 == 0


def below_a_hundred(n: Any) -> None:
    assert n < 100


def above_eight_rows(n: Any) -> None:
    assert n * 4 > 32


def as_any(n: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("asks", "held"),
    [
        (as_number, {32}),
        (as_eights, {32, 40, 128}),
        (below_a_hundred, {9, 31, 32, 40}),
        (above_eight_rows, {9, 31, 32, 40, 128}),
        (as_any, {9, 31, 32, 40, 128}),
    ],
)
def test_sizes_that_compilation_settles(asks: Callable[[Any], None], held: set[int]) -> None:
    """A compiler may find that its code is for one size, or for some: it holds for the size it was made for at least."""

    def compiler(module: fx.GraphModule, inputs: list[Any]) -> Any:
        asks(inputs[1].shape[0])
        return module

    module = fx.symbolic_trace(lambda n, x: x + n)
    _, holds = with_sizes(compiler, module, 32, lambda n: [([n, 4], [4, 1], torch.ones(32, 4))])
    assert holds(32)
    assert {n for n in (9, 31, 32, 40, 128) if holds(n)} == held


@needs_compiler
def test_inductor_settles_a_size(caplog: pytest.LogCaptureFixture) -> None:
    """A literal in the graph is as long as the chunk: the code is for that length, and is kept."""

    def add(x: Tensor) -> tuple[Tensor]:
        return (x + x.new_full((32, 4), 2.0),)

    x = torch.randn(32, 4)
    numbers = (32, 4, 4, 1)
    form = compiled_segments.compiled(fx.symbolic_trace(add), Family((1, 0, 0, 0), (0, 4, 4, 1), 0), numbers, [x])
    assert not said(caplog)
    assert not isinstance(form.run, fx.GraphModule)
    assert (form.fits(numbers), form.fits((33, 4, 4, 1))) == (True, False)
    assert torch.equal(form.call(numbers, [x])[0], x + 2)


@pytest.mark.parametrize("kind", chunked_scans.WITHIN)
def test_the_fake_result_of_a_reverse_scan_lies_in_memory_as_the_real_one_does(kind: str) -> None:
    """Compiled code asserts the strides of the fake result."""
    rows = torch.ones(2, 5, 3).transpose(1, 2)
    reverse = getattr(torch.ops.streamfx, f"reverse_{kind}")
    real = reverse(rows, 1)
    with FakeTensorMode() as mode:
        fake = reverse(mode.from_tensor(rows), 1)
    assert (fake.stride(), fake.dtype) == (real.stride(), real.dtype) == ((15, 5, 1), torch.float32)


ONE_STEP = """
import torch
from torch._dynamo.utils import counters
from tests.support.small import Causal, tokens

model, ids = Causal(), tokens(2, 11)
torch.compile(model, backend="streambp", options={"chunk_size": 4, "bodies": "inductor"})(ids, ids).backward()
print(counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"])
"""


@pytest.mark.long
@needs_compiler
def test_another_process_finds_bodies_on_disk(tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(root)}
    found = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", ONE_STEP], env=environment, cwd=root, capture_output=True, text=True)
        found.append(tuple(map(int, done.stdout.split())))
    (missed, none), (again, hits) = found
    assert (none, again) == (0, 0)
    assert hits == missed > 0


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize("make", [decoders.Plain, decoders.Triangle, decoders.Window], ids=lambda make: make.__name__)
def test_decoders(make: Callable[[], nn.Module]) -> None:
    ids = layouts.tokens(decoders.VOCABULARY, 2, 19)
    for chunk_size in (7, 16):
        torch._dynamo.reset()
        compare(decoders.made(make), {"ids": ids, "labels": ids}, chunk_size=chunk_size, bodies="inductor", streams=True)
