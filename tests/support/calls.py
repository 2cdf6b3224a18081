"""Record the calls of a function."""

from collections.abc import Callable
from typing import Any

import pytest


def noted(patch: pytest.MonkeyPatch, owner: Any, name: str, of: Callable[..., Any] = lambda *_: None) -> list[Any]:
    """A list that gets `of(*arguments)` for each call of `owner.name`, which is called as before."""
    calls: list[Any] = []
    function = getattr(owner, name)

    def run(*given: Any, **how: Any) -> Any:
        calls.append(of(*given))
        return function(*given, **how)

    patch.setattr(owner, name, run)
    return calls
