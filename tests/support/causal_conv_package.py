"""The causal-conv1d package, or a stand-in if it is not installed."""

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

IS_STAND_IN = importlib.util.find_spec("causal_conv1d") is None
if IS_STAND_IN:
    sys.path.append(str(Path(__file__).parent / "kernels"))

_package: Any = importlib.import_module("causal_conv1d")
causal_conv1d_fn = _package.causal_conv1d_fn
if IS_STAND_IN:  # models of transformers look for the package when they are imported: none of them is to find this one
    sys.path.pop()
    del sys.modules["causal_conv1d"]
