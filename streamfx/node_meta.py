"""The keys of `node.meta` that streamfx reads or writes. No other module spells them out.

In graphs that torch or a user may see, keys of our own start with `streamfx_`.
"""

from __future__ import annotations

# Keys of torch
VALUE = "val"  # the node's value as fake tensors, numbers, or a tuple of them
EXAMPLE_VALUE = "example_value"  # the same in Dynamo graphs
DESCRIPTION = "desc"  # the argument or result of the user's function that an input or output of the joint graph is
FROM_NODE = "from_node"
GRAPH_ARGUMENT = "grapharg"
MODULES = "nn_module_stack"
FORWARD_MODULES = "fwd_nn_module_stack"  # of the forward node to which a backward node belongs
RECOMPUTE = "recompute"  # the policy of selective activation checkpointing
STACK_TRACE = "stack_trace"

# Inputs and constants
STATIC_ADDRESS = "streamfx_static_address"  # of an input: the model holds it, as a parameter or a buffer
MUTATED = "streamfx_mutated"  # of an input: the graph writes to it
PATTERN = "streamfx_pattern"  # of an input or a constant: its mask values, as `Pieces`
CONSTANT = "streamfx_constant"  # of a constant: its tensor
GRAPH = "streamfx_graph"  # of a function that a higher-order operator calls: its graph module

# Outputs
ALIASES = "streamfx_memories"  # of an output: per result, the names of the values whose memory it aliased when traced
RESULT_VIEWS = "streamfx_result_views"  # of an output: per result that is a view of another value, its `MemoryPlace`

# Operators of the joint graph
KEPT_WITHOUT_USERS = "streamfx_stays"  # of an operator: it is not removed even without users
ORIGIN = "streamfx_origin"  # of an operator that a pass wrote: the name of the traced operator that it replaces
TRACED_STRIDES = "streamfx_layouts"  # of an operator, or the output: the traced strides of its tensor operands
SPLIT_FROM = "streamfx_part_of"  # of attention of some heads: the name of the attention of all heads
FALLBACK_REASON = (
    "streamfx_why_whole"  # of an operator: why it was not rewritten into an operator that has a rule, so that it falls back
)
OWN_AXES = "streamfx_own_axes"  # of a view: it has its own axes, which start at the first row of the view
# of a view of all rows at once: per such dimension, the value and dimension with the same axis (a gradient, which returns to
# chunks), or None for an axis that is not part of the sequence
MATERIALIZED = "streamfx_collected"
WRITES_EACH_ONCE = "streamfx_each_once"  # of a scatter: each element of the result is written once
UNROLLED = "streamfx_unrolled"  # of a recurrence: the name of a value that its unrolled loop computed
FORWARD_OPERATOR = "streamfx_forward"  # of a recurrence's backward operator: its forward operator
DRAW = "streamfx_draw"  # of a random operator: the node of the step's seed, and the operator's index

# Host programs and loop bodies
JOINT = "joint"  # the name of the joint graph's node for this value
HAS_KEYS = "has_keys"
TRACED_NAME = "streamfx_traced"  # of an operator between loops: its name in the joint graph
REGION = "streamfx_run"  # the index of the region to which the node belongs
STACKED = "streamfx_stacked"  # of a loop's result: its chunks are concatenated
EXCLUSIVE = "streamfx_saved_for_one"  # of an input: a loop's result that the forward graph keeps for this graph only
COLLECTIVE_TEXT = "streamfx_reduced"  # of a reduction over ranks in a loop body: the text by which ranks compare it
