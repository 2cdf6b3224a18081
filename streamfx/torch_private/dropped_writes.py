"""Writes in place that AOTAutograd drops with any backend: to a zero-dimensional float64 tensor on the CPU (2.11 to 2.13).

It treats such tensors as Python numbers. Writes to a view, such as `seen[...] = x`, are kept.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from streamfx.node_meta import EXAMPLE_VALUE
from streamfx.torch_private.lines import source_line

DROPS_WRITES = torch.__version__ < "2.14"


def dropped_writes(graph: fx.Graph) -> list[str]:
    """Return the user's source lines in a Dynamo graph whose writes AOTAutograd drops, each once (2.11, 2.13).

    These lines write in place to an input (or a buffer of the model) that it treats as a Python number. Empty on 2.14, which
    drops none.
    """
    if not DROPS_WRITES:
        return []
    writes = (node for node in graph.nodes if node.op in ("call_method", "call_function") and _is_in_place(node.target))
    written_inputs = ((node, node.args[0].meta.get(EXAMPLE_VALUE)) for node in writes if _is_input(node.args[:1]))
    dropped = (node for node, value in written_inputs if isinstance(value, torch.Tensor) and _is_like_a_number(value))
    return list(dict.fromkeys(source_line(node) for node in dropped))


def _is_in_place(target: Any) -> bool:
    """Return whether a method (`add_`), or a function such as `iadd` or `relu_`, writes to its first argument, by its name."""
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return bool(re.fullmatch(r"[a-z].*[^_]_|i(add|sub|mul|truediv|floordiv|pow|mod)", name))


def _is_input(arguments: Sequence[Any]) -> bool:
    """Return whether one of the arguments is an input of the graph."""
    return any(isinstance(argument, fx.Node) and argument.op == "placeholder" for argument in arguments)


def _is_like_a_number(value: torch.Tensor) -> bool:
    """Return whether AOTAutograd treats a tensor as a Python number: zero-dimensional, float64, on the CPU."""
    return value.dim() == 0 and value.dtype is torch.float64 and value.device.type == "cpu"
