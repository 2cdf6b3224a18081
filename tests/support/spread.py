"""A spread of many cases: some every time, all with `--long`."""

from collections.abc import Iterable
from typing import Any

import pytest


def spread(cases: Iterable[Any], every: int) -> list[Any]:
    """Parameters of which each `every`-th runs every time; a case is a value, or a tuple of them."""
    return [case if i % every == 0 else _long(case) for i, case in enumerate(cases)]


def only(first: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """Parameters of which those in `first` run every time."""
    named = list(first)
    assert all(name in cases for name in named), f"no such cases: {named}"
    return [case if case in named else _long(case) for case in cases]


def _long(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)
