"""The flash-attn package, or a stand-in if it is not installed, which other packages can import, too.

`for_transformers()`: transformers asks for a GPU before it takes the package, and remembers the answer.
"""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

INSTALLED = Path(__file__).parent / "installed"
_found = importlib.util.find_spec("flash_attn")  # pytest imports this file under two names: the second finds what the first added
IS_STAND_IN = _found is None or (_found.origin is not None and Path(_found.origin).is_relative_to(INSTALLED))
if _found is None:
    sys.path.append(str(INSTALLED))

_package: Any = importlib.import_module("flash_attn")
flash_attn_func, flash_attn_varlen_func = _package.flash_attn_func, _package.flash_attn_varlen_func


@contextmanager
def for_transformers() -> Iterator[None]:
    """A context in which models with `attn_implementation="flash_attention_2"` can be built and called, even on the CPU."""
    from transformers.utils import import_utils

    names = ("is_torch_cuda_available", "is_flash_attn_2_available", "_package_distribution_mapping")  # 5.17 has no such mapping
    asked = [getattr(import_utils, name) for name in names if hasattr(import_utils, name)]
    _forget(*asked)
    with patch.object(torch.cuda, "is_available", lambda: True):
        assert import_utils.is_flash_attn_2_available()
    try:
        yield
    finally:
        _forget(*asked)


def _forget(*functions: object) -> None:
    for function in functions:
        function.cache_clear()  # type: ignore[attr-defined]
