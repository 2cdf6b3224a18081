"""When does Inductor compile, a whole graph or the bodies of loops?"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from streamfx.cost.flops import flops_of_graph
from streamfx.ir.joint import device_of
from streamfx.options import Options
from streamfx.torch_private.inductor import has_compiler

WORTH_COMPILING = 10**11  # FLOPs of a step: below this, compiling takes longer than it saves in a thousand steps


def uses_inductor(options: Options, graph: fx.Graph) -> bool:
    """Whether Inductor is to compile what computes a joint graph: as asked; if that is left open, where it pays."""
    if options.bodies != "auto":
        return options.bodies == "inductor"
    return flops_of_graph(graph) >= WORTH_COMPILING and has_compiler(device_of(graph).type)


def compiles_whole(options: Options, inputs: Iterable[Any]) -> bool:
    """Whether Inductor gets a graph of these inputs where it fits as it stands: however small, as with `torch.compile` alone."""
    kinds = {value.device.type for value in inputs if isinstance(value, torch.Tensor)}
    return options.bodies == "inductor" or (options.bodies == "auto" and all(map(has_compiler, kinds)))
