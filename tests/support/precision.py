"""Reads `float32` as `float64` in the source of packages of models, so that rounding of inner casts hides nothing.

Import this module before those packages. Only the text of modules that are loaded afterwards changes.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, ModuleType
from typing import Any

import torch

WIDENED = (
    (re.compile(r"\btorch\.float32\b"), "torch.float64"),
    (re.compile(r"\btorch\.float\b(?!\d)"), "torch.float64"),
    (re.compile(r"\.float\(\)"), ".double()"),
)
WIDENED_PACKAGES = ("transformers", "x_transformers", "torchtitan")
LEFT_ALONE = (
    "transformers.utils",
    "transformers.modeling_utils",
    "transformers.conversion",
    "transformers.modeling_flash_attention_utils",  # these two cast heads if they are float32
    "transformers.integrations.flash_attention",
)


class _WideningLoader(importlib.machinery.SourceFileLoader):
    def source_to_code(  # type: ignore[override]  # typeshed has one more level of static methods than CPython
        self, data: Any, path: Any, *, _optimize: int = -1
    ) -> CodeType:
        text = importlib.util.decode_source(data) if isinstance(data, bytes) else data
        for pattern, replacement in WIDENED:
            text = pattern.sub(replacement, text)
        code: CodeType = compile(text, path, "exec", dont_inherit=True, optimize=_optimize)
        return code

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package, _, inner = fullname.partition(".")
        if package not in WIDENED_PACKAGES or not inner or fullname.startswith(LEFT_ALONE):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _WideningLoader(spec.loader.name, spec.loader.path)
        return spec


def widen_models() -> None:
    """Install the import hook; a no-op when it is there."""
    packages = tuple(f"{package}." for package in ("transformers.models", *WIDENED_PACKAGES[1:]))
    loaded = [name for name in sys.modules if name.startswith(packages)]
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if loaded:
        raise RuntimeError(f"models are already loaded ({loaded[0]}): install the hook first")
    sys.meta_path.insert(0, _Finder())


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """The default dtype, for a while."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
