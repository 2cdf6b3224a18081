"""The table of lowerings: by operator, the function that emits the operator into a loop body, for the rows of one chunk.

Without an entry, an operator is copied; a random one draws with a generator that is seeded for the chunk. `lowerings.py` and
`running_lowerings.py` fill the table when they are imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import fx

from streamfx.ir.program import FirstRow
from streamfx.node_meta import DRAW
from streamfx.passes.ops.traits import is_random
from streamfx.runtime.outer import COPYING_VIEWS
from streamfx.runtime.rng import replay
from streamfx.torch_private.graph_nodes import add_call

if TYPE_CHECKING:
    from streamfx.passes.lowering.bodies import BodyBuilder

Lowering: TypeAlias = "Callable[[BodyBuilder, fx.Node], fx.Node]"
LOWERINGS: dict[Any, Lowering] = {}


def register_lowering(*operators: Any) -> Callable[[Lowering], Lowering]:
    """Return a decorator that registers a function as the lowering of these operators (or classes of operators).

    The function emits the chunk's version of a joint-graph node into a loop body, and returns the body's node.
    """

    def register(function: Lowering) -> Lowering:
        for target in operators:
            LOWERINGS[target] = function
        return function

    return register


def find_lowering(node: fx.Node) -> Lowering:
    """Return the lowering of an operator: the registered one, else a seeded draw for a random operator, else a copy."""
    lowering = LOWERINGS.get(node.target) or LOWERINGS.get(type(node.target))
    return lowering or (emit_seeded_draw if is_random(node) else emit_copy)


def emit_copy(builder: BodyBuilder, node: fx.Node) -> fx.Node:
    """Emit the same operator into the loop body, on the chunk's rows and with the chunk's sizes; return the body's node."""
    args, kwargs = builder.arguments(node)
    target = COPYING_VIEWS.get(node.target, node.target)
    return add_call(builder.graph, target, args, kwargs)


def emit_seeded_draw(builder: BodyBuilder, node: fx.Node) -> fx.Node:
    """Emit a random operator whose generator is seeded from the step's seed, the operator's index and the chunk's first row.

    So recomputing the chunk draws the same numbers.
    """
    seed, draw_index = node.meta[DRAW]
    source = builder.outer(seed)
    assert source is not None
    args, kwargs = builder.arguments(node)
    first_row = builder.feed("first_row", FirstRow(), None)
    draw = (str(node.target), builder.input_rows(seed, source, ()), draw_index, first_row)
    return builder.graph.call_function(replay, (*draw, *args), kwargs)
