"""When does Inductor compile, a whole graph or the bodies of loops?"""

from __future__ import annotations

from torch import fx

from streamfx.cost.flops import flops_of_graph
from streamfx.ir.joint import device_of
from streamfx.options import Options
from streamfx.torch_private import has_compiler

WORTH_COMPILING = 10**11  # FLOPs of a step: below this, compiling takes longer than it saves in a thousand steps


def uses_inductor(options: Options, graph: fx.Graph) -> bool:
    """Whether Inductor is to compile what computes a joint graph: as asked; if that is left open, where it pays."""
    if options.bodies != "auto":
        return options.bodies == "inductor"
    return flops_of_graph(graph) >= WORTH_COMPILING and has_compiler(device_of(graph).type)
