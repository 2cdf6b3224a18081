"""Which versions of PyTorch the tests have run on: private interfaces may change with any other."""

from __future__ import annotations

import torch

OLDEST, NEWEST = (2, 11), (2, 14)  # pyproject.toml allows the same; docs/versions.md says what was run on each


def untested() -> str:
    """A sentence if the tests never ran on this version of PyTorch, otherwise empty."""
    number = torch.__version__.split(".")[:2]
    if OLDEST <= tuple(map(int, number)) <= NEWEST:
        return ""
    oldest, newest = (".".join(map(str, version)) for version in (OLDEST, NEWEST))
    return (
        f"PyTorch {torch.__version__} is not tested: streamfx relies on internals of PyTorch, and its tests ran on {oldest} to "
        f"{newest}. Run streamfx.verify on your model before you train"
    )
