"""Code for loops, written and compiled: the same numbers as bodies that are interpreted; the host waits once per mask of data."""

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import sympy
import torch
from torch import Tensor, fx, nn
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass

from streamfx.dialect.scans import REVERSE_SCANS
from streamfx.ir.program import START, STOP
from streamfx.ir.sizes import Real, Truth
from streamfx.runtime import compiled_segments, runtime_sizes
from streamfx.runtime.chunks import Chunks
from streamfx.runtime.compiled_segments import Segment
from streamfx.runtime.loop_codegen import LoopWriter
from streamfx.runtime.outer import HostProgram
from streamfx.runtime.shape_families import Family, FamilyCode, single_member
from streamfx.torch_private import FakeTensorMode, TorchDispatchMode
from streamfx.torch_private.inductor import InductorFailedError
from streamfx.torch_private.symbolic_sizes import with_sizes
from tests.support import decoders, layouts
from tests.support.exactness import compare
from tests.support.small import Causal, Padded, tokens
from tests.support.stretches import interpreted
from tests.support.tables import named_cases

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="Inductor needs a C++ compiler")
INDUCTOR: dict[str, Any] = {"chunk_size": 4, "bodies": "inductor"}


@pytest.fixture
def forms(monkeypatch: pytest.MonkeyPatch) -> dict[Any, list[FamilyCode]]:
    """The code that a test compiles; each warning may appear once per test."""
    found: dict[Any, list[FamilyCode]] = {}
    monkeypatch.setattr(compiled_segments, "_versions", found)
    monkeypatch.setattr(compiled_segments, "_warned", set())
    return found


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("streamfx")]


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize("make", [decoders.Plain, decoders.Triangle, decoders.Window], ids=lambda make: make.__name__)
def test_compiled_bodies_are_exact(
    make: Callable[[], nn.Module], forms: dict[Any, list[FamilyCode]], caplog: pytest.LogCaptureFixture
) -> None:
    """Chunks of two sizes: the last one is shorter, and there is one form of each stretch for both."""
    ids = layouts.tokens(decoders.VOCABULARY, 2, 19)
    compare(decoders.made(make), {"ids": ids, "labels": ids}, streams=True, **INDUCTOR)
    assert all(len(own) == 1 and own[0].family.at is not None for own in forms.values())
    assert not said(caplog)


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("place", "error", "text"),
    [
        ("compile_for_sizes", InductorFailedError("no compiler here"), "no compiler here"),
        ("shapes_for", KeyError(1024), "streamfx failed (KeyError: 1024; please report this)"),
    ],
)
def test_a_body_that_does_not_compile_is_interpreted(
    place: str, error: Exception, text: str, forms: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And said once; a failure of ours is not called Inductor's."""

    def fails(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(compiled_segments, place, fails)
    compare(Causal().double(), (tokens(2, 11), tokens(2, 11)), **INDUCTOR)
    (found,) = said(caplog)
    assert text in found and ("Inductor" in found) == (place == "compile_for_sizes")


@pytest.mark.parametrize(("failures", "attempts"), [(1, [1]), (2, [1, 3]), (9, [1, 3, 7, 15, 31])])
def test_a_body_compiles_after_memory_is_free(
    failures: int, attempts: list[int], forms: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
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
    segment, x, found = compiled_segments.Segment(fx.symbolic_trace(lambda x: (x + 1,))), torch.randn(4, 3), []
    segment._pause = compiled_segments.CompilePause(length=2)
    for call in range(1, 70):
        before = tries
        assert torch.equal(segment(x)[0], x + 1)
        found += [call] if tries > before else []
    assert found == attempts
    assert [isinstance(form.run, fx.GraphModule) for own in forms.values() for form in own] == [False]
    assert ["memory ran out" in text for text in said(caplog)] == [True] * (failures > 1)


class Settings(CustomGraphPass):
    """Notes Inductor's settings as it compiles a graph."""

    def __init__(self) -> None:
        self.found: list[tuple[Any, ...]] = []

    def __call__(self, graph: fx.Graph) -> None:
        triton = inductor_config.triton
        self.found.append((triton.cudagraphs, triton.autotune_at_compile_time, triton.unique_kernel_names))

    def uuid(self) -> Any:
        return None  # no cache: each graph is compiled


@pytest.mark.compiled
@needs_compiler
def test_bodies_compile_without_cuda_graphs() -> None:
    """A replayed CUDA graph overwrites results of other chunks, and tuning ahead takes memory that no plan counts."""
    noted = Settings()
    user = {"triton.cudagraphs": True, "triton.unique_kernel_names": False, "post_grad_custom_pre_pass": noted}
    x, family = torch.randn(4, 3), Family((1, 0, 0, 0), (0, 3, 3, 1), 0)
    with inductor_config.patch(user):
        for own in (family, single_member((4, 3, 3, 1))):
            form = compiled_segments.compile_segment(fx.symbolic_trace(lambda x: (x + 1,)), own, (4, 3, 3, 1), [x])
            assert not isinstance(form.run, fx.GraphModule)
    assert noted.found == [(False, None, False)] * 2


ASKS: dict[str, tuple[Callable[[Any], Any], set[int]]] = named_cases("questions", globals())


@pytest.mark.parametrize("asks", ASKS)
def test_code_is_reused_for_sizes_that_pass_its_guards(asks: str) -> None:
    """Guards of a compiler may restrict code to one size, or some; the code always holds for the size it was compiled for."""

    def compiler(module: fx.GraphModule, inputs: list[Any]) -> Any:
        ASKS[asks][0](inputs[1].shape[0])
        return module

    module = fx.symbolic_trace(lambda n, x: x + n)
    _, holds = with_sizes(compiler, module, 32, lambda n: [([n, 4], [4, 1], torch.ones(32, 4))])
    assert {n for n in (9, 31, 32, 40, 128) if holds(n)} == ASKS[asks][1]


@needs_compiler
def test_code_for_one_size_is_not_reused_for_another(caplog: pytest.LogCaptureFixture) -> None:
    """A literal in the graph is as long as the chunk: the code is for that length, and is kept."""

    def add(x: Tensor) -> tuple[Tensor]:
        return (x + x.new_full((32, 4), 2.0),)

    x, numbers = torch.randn(32, 4), (32, 4, 4, 1)
    form = compiled_segments.compile_segment(fx.symbolic_trace(add), Family((1, 0, 0, 0), (0, 4, 4, 1), 0), numbers, [x])
    assert not said(caplog) and not isinstance(form.run, fx.GraphModule)
    assert (form.fits(numbers), form.fits((33, 4, 4, 1))) == (True, False)
    assert torch.equal(form.call(numbers, [x])[0], x + 2)


@pytest.mark.parametrize("kind", REVERSE_SCANS)
def test_a_reverse_scan_has_the_strides_of_its_fake_result(kind: str) -> None:
    """Compiled code asserts the strides of the fake result."""
    rows = torch.ones(2, 5, 3).transpose(1, 2)
    reverse = REVERSE_SCANS[kind]
    real = reverse(rows, 1)
    with FakeTensorMode() as mode:
        fake = reverse(mode.from_tensor(rows), 1)
    assert (fake.stride(), fake.dtype) == (real.stride(), real.dtype) == ((15, 5, 1), torch.float32)


WAITS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "_unique2", "unique_dim", "masked_select", "repeat_interleave"}


class Waits(TorchDispatchMode):
    """Counts operators whose result the host has to know."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        self.found.update([name] if name in WAITS else [])
        return function(*args, **(kwargs or {}))


@contextmanager
def waits() -> Iterator[Counter[str]]:
    """What the host waits for inside of outer graphs: Dynamo compiles nothing for a caller with a mode of its own."""
    mode, hosted, run = Waits(), set[int](), HostProgram.run
    copied, listed = Tensor.cpu, Tensor.tolist

    def watched(self: HostProgram, arguments: list[Any]) -> Any:
        with mode:
            return run(self, arguments)

    def cpu(self: Tensor) -> Tensor:
        mode.found["cpu"] += 1
        made = copied(self).clone()
        hosted.add(made.untyped_storage().data_ptr())
        return made

    def tolist(self: Tensor) -> Any:
        mode.found["tolist"] += self.untyped_storage().data_ptr() not in hosted
        return listed(self)

    patches = mock.patch.multiple(Tensor, cpu=cpu, tolist=tolist)
    with mock.patch.object(HostProgram, "run", watched), patches:
        yield mode.found


@pytest.mark.compiled
@pytest.mark.parametrize("reads_data", [False, True])
def test_the_host_waits_once_per_step_if_a_mask_depends_on_data(reads_data: bool) -> None:
    """Not once per chunk or layer, and not again in backward; never if no mask depends on data."""
    keep = torch.tensor([[59], [60]]) > torch.arange(61)
    given = (torch.randn(2, 61, 8), keep) if reads_data else (tokens(2, 61), tokens(2, 61))
    call = torch.compile(Padded(layers=3, width=8) if reads_data else Causal(), backend="streambp", options={"chunk_size": 8})
    for _ in range(2):
        with waits() as found:
            call(*given).square().sum().backward()
        assert +found == Counter(cpu=int(reads_data))


ROWS, OTHER = (sympy.Symbol(name, integer=True, positive=True) for name in ("s0", "s1"))


def drawn_size(random: Random) -> Any:
    """A size that depends on a chunk's rows or keys, along the sequence or another axis."""
    lengths = (ROWS, OTHER, ROWS - 1, OTHER + 2, 2 * OTHER)
    whole: tuple[Any, ...] = random.choice(((0, ROWS), (random.choice((-1, 0, 2)), random.choice(lengths))))
    kind = random.choice(
        (
            runtime_sizes.member_count,
            runtime_sizes.member_start,
            runtime_sizes.span_count,
            runtime_sizes.span_start,
            runtime_sizes.shifted_count,
        )
    )
    if kind in (runtime_sizes.span_count, runtime_sizes.span_start):
        whole = (random.choice((-sympy.oo, -sympy.oo, -3, 0)), random.choice((sympy.oo, sympy.oo, -1, 0)), *whole)
    if kind is runtime_sizes.shifted_count:
        whole = (*whole, random.choice((-1, 0, 2, OTHER - 3)), random.choice(lengths))
    made = kind(START, STOP, ROWS, *whole)
    return random.choice((made, 2 * made, made * OTHER + 1, (made - 1) * (made + OTHER), -made, 3 - 2 * made + STOP - START))


@pytest.mark.parametrize("seed", range(30))
def test_generated_size_code_equals_the_size_functions(seed: int) -> None:
    random = Random(seed)
    wanted = [drawn_size(random) for _ in range(16)]
    writer = LoopWriter(SimpleNamespace(length=ROWS))  # type: ignore[arg-type]
    texts = [writer.size(size).text for size in wanted]
    lines = [*writer.before_loop, "found = []", "for start, stop in bounds:"]
    lines += [f"    {line}" for line in (*writer.per_chunk, f"found.append([{', '.join(texts)}])")]
    length, step = random.choice(((13, 5), (12, 4), (3, 8), (1, 1))), random.choice((7, 20))
    bounds, env = list(Chunks(*length)), {"s0": length[0], "s1": step}
    space: dict[str, Any] = {**runtime_sizes.FUNCTIONS, **env, "bounds": bounds}
    exec("\n".join(lines), space)
    computed = [
        [runtime_sizes.compiled_size(size)({**env, "start": one, "stop": other}) for size in wanted] for one, other in bounds
    ]
    assert space["found"] == computed, lines


def test_numbers_computed_from_sizes_may_be_fractions() -> None:
    n = sympy.Symbol("n", integer=True, positive=True)
    assert runtime_sizes.compiled_size(Real(n * sympy.Float(0.25)))({"n": 5}) == 1.25
    assert runtime_sizes.compiled_size(Truth(n > 3))({"n": 4}) is True


@pytest.mark.parametrize("several", [False, True])
def test_inputs_with_other_strides_use_other_code(several: bool) -> None:
    """Code is found by how inputs lie, and reads them so."""
    segment, x = Segment(fx.symbolic_trace(lambda x: (x + 1,))), torch.randn(4, 4)
    with interpreted():
        for given in (x, x.t(), x, x.t(), x.double(), x):
            assert torch.equal(segment(given, has_several_lengths=several)[0], given + 1)
