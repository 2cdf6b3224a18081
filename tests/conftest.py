"""Set-up of all tests: `--long`, one thread, no leftovers of torch.compile, float64 inside of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

from tests.support.precision import widen_transformers

if find_spec("transformers") is not None:
    widen_transformers()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the full cross products, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--long"):
        return
    for item in items:
        if "long" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="runs only with --long"))


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Each test compiles anew, on one thread, from one seed."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
