"""Avoid graph breaks in peft's DoRA, which checks in each layer whether a weight is quantized, by the module name of its type.

While a model is enabled, a plain parameter is returned directly, as peft would; for any other weight peft's function is called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import nn

DEQUANTIZE, READERS = "dequantize_module_weight", ("peft.tuners.lora.dora", "peft.tuners.lora.variants")
QUANTIZED_WEIGHT = "W_q"  # the name of the quantized weight in HQQ's layers

_originals: list[tuple[ModuleType, Callable[..., Any]]] = []
_num_enabled = 0


def replace_functions() -> None:
    """Replace peft's function in each of its modules that is imported, so that it returns plain parameters directly.

    Call this once for each enabled module, and `restore_functions` when it is disabled.
    """
    global _num_enabled
    _num_enabled += 1
    replaced_modules = {module for module, _ in _originals}
    for name in READERS:
        module = sys.modules.get(name)
        if module is not None and module not in replaced_modules and DEQUANTIZE in vars(module):
            _originals.append((module, vars(module)[DEQUANTIZE]))
            setattr(module, DEQUANTIZE, _plain_weight_first(vars(module)[DEQUANTIZE]))


def restore_functions() -> None:
    """Undo one `replace_functions`; the last call restores peft's function."""
    global _num_enabled
    _num_enabled -= 1
    while _originals and not _num_enabled:
        module, function = _originals.pop()
        setattr(module, DEQUANTIZE, function)


def _plain_weight_first(dequantize: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that returns a plain parameter directly, and calls peft's function for any other weight."""

    def weight_of(module: nn.Module) -> Any:
        """Return the weight of a module as a plain tensor: its parameter, or what peft's function returns for it."""
        is_plain = type(module.weight) is nn.Parameter and not hasattr(module, QUANTIZED_WEIGHT)
        return module.weight if is_plain else dequantize(module)

    return weight_of
