"""peft's DoRA asks in each layer whether a weight is quantized, by the name of its type's module, which breaks the graph there.

While a model is enabled, a plain parameter is answered with itself, as peft does it; of any other weight peft is asked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import nn

ASKS, READERS = "dequantize_module_weight", ("peft.tuners.lora.dora", "peft.tuners.lora.variants")
QUANTIZED = "W_q"  # HQQ's layers hold another weight under this name

_before: list[tuple[ModuleType, Callable[..., Any]]] = []
_enabled = 0


def listen() -> None:
    """Answer in the place of peft, if it is there."""
    global _enabled
    _enabled += 1
    known = {module for module, _ in _before}
    for name in READERS:
        module = sys.modules.get(name)
        if module is not None and module not in known and ASKS in vars(module):
            _before.append((module, vars(module)[ASKS]))
            setattr(module, ASKS, _answer(vars(module)[ASKS]))


def forget() -> None:
    """Undo one `listen`; the last gives peft its own function back."""
    global _enabled
    _enabled -= 1
    while _before and not _enabled:
        module, function = _before.pop()
        setattr(module, ASKS, function)


def _answer(ask: Callable[..., Any]) -> Callable[..., Any]:
    def weight_of(module: nn.Module) -> Any:
        is_plain = type(module.weight) is nn.Parameter and not hasattr(module, QUANTIZED)
        return module.weight if is_plain else ask(module)

    return weight_of
