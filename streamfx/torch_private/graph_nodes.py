"""Nodes of FX graphs, and their fake values, at less cost than by FX and a fake mode.

`Graph.create_node` searches the arguments for symbolic sizes, which takes half of its time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor  # 2.11, 2.13
from torch.utils._python_dispatch import _disable_current_modes  # 2.11, 2.13

# the operands of a node as the keys of a dictionary: `Node.all_input_nodes` copies them to a list (2.12, 2.13)
operands_of: Callable[[fx.Node], Mapping[fx.Node, None]] = attrgetter("_input_nodes")


def add_call(graph: fx.Graph, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
    """Add a call of a function to a graph, as `graph.call_function` does, and return its node (2.12, 2.13)."""
    node = graph.create_node("call_function", target, name=_name_of(target))
    node._update_args_kwargs(args, kwargs or {})
    return node


def add_placeholder(graph: fx.Graph, name: str) -> fx.Node:
    """Add an input of about this name to a graph, whose target is its unique name, and return its node (2.12, 2.13)."""
    placeholder = graph.create_node("placeholder", name, name=name if name.islower() and name[0] != "_" else None)
    placeholder.target = placeholder.name
    return placeholder


def add_copy(graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    """Add a copy of a node to another graph, and return it; `copies` maps the node's operands to their copies (2.12, 2.13)."""
    copy = graph.create_node(node.op, node.target, name=node.name, type_expr=node.type)
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
    copy._update_args_kwargs(args, kwargs)
    copy.meta = dict(node.meta)
    return copy


def like_fake(fake: FakeTensor) -> FakeTensor:
    """Return a fake tensor in new memory, with the shape, strides, dtype and device of another (2.12, 2.13)."""
    with _disable_current_modes():
        memory = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="meta")
    return FakeTensor(fake.fake_mode, memory, fake.device)


@cache
def _name_of(target: Any) -> str:
    """Return the name that FX gives a call's node before it makes it unique (2.12, 2.13)."""
    return fx.Graph()._target_to_str(target)
