"""When does Inductor compile, a whole graph or the bodies of loops?"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from streamfx.options import Options
from streamfx.report.flops import flops_of_graph
from streamfx.torch_private import has_compiler

WORTH_COMPILING = 10**11  # FLOPs of a step: below this, compiling takes longer than it saves in a thousand steps


def uses_inductor(options: Options, graph: fx.Graph) -> bool:
    """Whether Inductor is to compile what computes a joint graph: as asked; if that is left open, where it pays."""
    if options.bodies != "auto":
        return options.bodies == "inductor"
    return flops_of_graph(graph) >= WORTH_COMPILING and has_compiler(device_of(graph).type)


def device_of(graph: fx.Graph) -> torch.device:
    """The device on which a graph computes: the first that is not the CPU."""
    values: list[Any] = [node.meta.get("val") for node in graph.nodes]
    devices = [value.device for value in values if isinstance(value, torch.Tensor)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
