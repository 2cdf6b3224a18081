"""Set-up of all tests: `--long`, `--update-goldens`, one thread, no leftovers of torch.compile, float64 inside packages."""

import gc
import logging
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import streamfx
from streamfx.kernels import mask_tiles
from streamfx.lazy import rewrite
from streamfx.passes.ops.rules import RULES
from streamfx.passes.ops.rules.stateful import BACKWARDS, STATEFUL
from streamfx.runtime.loop import Loop
from streamfx.torch_private import FakeTensor
from tests.support.goldens import golden
from tests.support.precision import widen_models

__all__ = ["golden"]

collect_ignore = [
    "support/fake_cuda",
    "support/hub_kernels.py",
    "support/installed",
    "support/kernels",
    "support/stateful",
    "support/without_distribution",
]  # packages and operators, there once, under their own names; programs that replace parts of torch

widen_models()
streamfx.configure(check_passes=True)

# pytest listens to loggers that do not propagate, and with a listener torch writes a trace of all that it compiles
logging.getLogger("torch.__trace").propagate = True


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the full cross products, too")
    parser.addoption("--update-goldens", action="store_true", help="write the golden files anew")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "compiled_once" in getattr(item, "fixturenames", ()):
            item.add_marker("compiled")
        if item.get_closest_marker("long") and not config.getoption("--long"):
            item.add_marker(pytest.mark.skip(reason="runs only with --long"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Each process runs whole files, then helps others, so that a file is set up once."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


@pytest.fixture(scope="module", autouse=True)
def freeze_old_objects() -> None:
    """The garbage collector skips objects that were imported before the tests of a file."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 1000)


@pytest.fixture(scope="module", autouse=True)
def propagate_our_logger() -> None:
    """Torch's logging gives our logger a handler, and import-linter disables existing loggers: pytest would see no records."""
    ours = logging.getLogger("streamfx")
    ours.propagate, ours.disabled = True, False


COMPILATIONS: list[object] = []  # that Dynamo began in this process


def note_compilation(compilation: Any) -> None:
    """Note a compilation that Dynamo began: AOTAutograd alone reports one, too, if it compiles a backward graph."""
    if compilation.callback_trigger.name == "DYNAMO":
        COMPILATIONS.append(compilation)


torch._dynamo.on_compile_start(note_compilation)


@pytest.fixture(autouse=True)
def fresh_compiler(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test runs on one thread, from one seed, with streamfx's own rules; if it is marked `compiled`, with an empty Dynamo.

    A default test without this mark that calls Dynamo fails: `pytest -m "not compiled"` is the quick run.
    """
    tables: tuple[dict[Any, Any], ...] = RULES, STATEFUL, BACKWARDS
    before = [dict(table) for table in tables]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    compiles = any(map(request.node.get_closest_marker, ("compiled", "long")))
    if compiles:
        torch._dynamo.reset()
    count = len(COMPILATIONS)
    yield
    if compiles:
        torch._dynamo.reset()
    for table, own in zip(tables, before, strict=True):
        table.clear()
        table.update(own)
    assert compiles or len(COMPILATIONS) == count, "this test calls Dynamo: mark it `pytest.mark.compiled`"


@pytest.fixture(autouse=True)
def split_small_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks of a few rows are split into tiles like those of long chunks."""
    monkeypatch.setattr(mask_tiles, "MIN_TILE_ROWS", 2)


@pytest.fixture(scope="session", autouse=True)
def defer_small_outputs() -> Iterator[None]:
    """Outputs of a few rows are deferred as large ones are."""
    with mock.patch.object(rewrite, "is_too_small_for_chunks", return_value=False):
        yield


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop's buffer that is read before it is written shows in each result: zeros by chance would hide it."""
    plain = Loop._new_buffer

    def new_buffer(self: Loop, item: Any, env: Any, zeroed: bool) -> torch.Tensor:
        made = plain(self, item, env, zeroed)
        if zeroed or isinstance(made, FakeTensor) or made.is_meta or not (made.is_floating_point() or made.is_complex()):
            return made
        return made.fill_(torch.nan)

    monkeypatch.setattr(Loop, "_new_buffer", new_buffer)


@pytest.fixture
def no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of steps that are too short look for no length that gains: `tests/test_plan_search.py` sees that they do."""
    monkeypatch.setattr("streamfx.tools.planner.step.gains_from", lambda *_: None)


@pytest.fixture(scope="module")
def compiled_once() -> Any:
    """A decoder whose logits are deferred, and its eager twin; compiled once for all tests of a file."""
    from tests.support.deferred import Compiled
    from tests.support.heads import decoder

    return Compiled(decoder(), "grad")


@pytest.fixture
def compiled(compiled_once: Any) -> Iterator[Any]:
    """The same, without gradients."""
    yield compiled_once
    compiled_once.model.zero_grad()
