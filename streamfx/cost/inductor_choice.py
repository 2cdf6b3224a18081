"""The decision to compile with Inductor, for a graph or for loop bodies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from streamfx.cost.flops import flops_of_graph
from streamfx.ir.joint import device_of
from streamfx.options import Options
from streamfx.torch_private.inductor import has_compiler

MIN_COMPILED_FLOPS = 10**11  # FLOPs of a step: below this, compilation takes longer than it saves in a thousand steps


def uses_inductor(options: Options, graph: fx.Graph) -> bool:
    """Return whether Inductor compiles the loop bodies of a joint graph: as the options say, or if it pays with "auto"."""
    if options.bodies != "auto":
        return options.bodies == "inductor"
    return flops_of_graph(graph) >= MIN_COMPILED_FLOPS and has_compiler(device_of(graph).type)


def compiles_in_background(options: Options, graph: fx.Graph) -> bool:
    """Return whether loop bodies run eagerly while another process compiles them: on a CPU, if Inductor is not requested."""
    return options.bodies == "auto" and device_of(graph).type == "cpu"


def compiles_graph(options: Options, inputs: Iterable[Any]) -> bool:
    """Return whether Inductor compiles a graph that fits without chunks, however small, as with `torch.compile` alone."""
    kinds = {value.device.type for value in inputs if isinstance(value, torch.Tensor)}
    return options.bodies == "inductor" or (options.bodies == "auto" and all(map(has_compiler, kinds)))
