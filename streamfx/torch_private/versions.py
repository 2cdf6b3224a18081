"""The PyTorch versions on which the tests have run: private interfaces may change in any other version."""

from __future__ import annotations

import torch

OLDEST, NEWEST = (2, 11), (2, 14)  # the same as in pyproject.toml; docs/versions.md lists the runs on each


def untested() -> str:
    """Return a warning for the user if the tests never ran on the installed PyTorch version, otherwise an empty text."""
    number = torch.__version__.split(".")[:2]
    if OLDEST <= tuple(map(int, number)) <= NEWEST:
        return ""
    oldest, newest = (".".join(map(str, version)) for version in (OLDEST, NEWEST))
    return (
        f"PyTorch {torch.__version__} is not tested: streamfx relies on internals of PyTorch, and its tests ran on {oldest} to "
        f"{newest}. Run streamfx.verify on your model before you train"
    )
