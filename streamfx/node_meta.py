"""The keys of `node.meta` that streamfx reads or writes. No other module spells them.

A key of our own begins with `streamfx_`: torch and other packages never see it.
"""

from __future__ import annotations

# Keys of torch
VALUE = "val"  # the node's value as FakeTensors, numbers, or a tuple of them
EXAMPLE_VALUE = "example_value"  # the same in Dynamo's graph
DESCRIPTION = "desc"  # which argument or result of the user's function an input or output of the joint graph is
FROM_NODE = "from_node"
GRAPH_ARGUMENT = "grapharg"
MODULES = "nn_module_stack"
FORWARD_MODULES = "fwd_nn_module_stack"  # of the forward node that a backward node belongs to
RECOMPUTE = "recompute"  # the policy of selective activation checkpointing
STACK_TRACE = "stack_trace"

# Inputs and constants
STATIC_ADDRESS = "streamfx_static_address"  # of an input: the model holds it, as a parameter or a buffer
MUTATED = "streamfx_mutated"  # of an input: the graph writes to it
PATTERN = "streamfx_pattern"  # of an input or a constant: the mask that it holds, as `Pieces`
CONSTANT = "streamfx_constant"  # of a constant: its tensor
GRAPH = "streamfx_graph"  # of a function that a higher-order operator calls: its graph module

# Outputs
MEMORIES = "streamfx_memories"  # of an output: per result, the names of the values whose memory it showed when traced
PLACES = "streamfx_places"  # of an output: per result that is part of another value, where it began in that

# Operators of the joint graph
STAYS = "streamfx_stays"  # runs even if it has no users
ORIGIN = "streamfx_origin"  # of an operator that a pass wrote: the name of the traced operator that it replaces
LAYOUTS = "streamfx_layouts"  # the strides of its tensor operands when it was traced
PART_OF = "streamfx_part_of"  # of attention of some heads: the name of the attention of all heads
WHY_WHOLE = "streamfx_why_whole"  # why an operator without a rule was not rewritten into one that has a rule
OWN_AXES = "streamfx_own_axes"  # of a view: it has axes of its own, which begin at the first row that it shows
COLLECTED = "streamfx_collected"  # of a view that shows all rows at once: per such dimension, the value and dimension with the
# same axis (a gradient, which returns to chunks), or None for an axis that is no part of the sequence
EACH_ONCE = "streamfx_each_once"  # of a scatter: each place of the result is written once
UNROLLED = "streamfx_unrolled"  # of a recurrence: the name of a value that its unrolled loop computed
FORWARD_OPERATOR = "streamfx_forward"  # of a recurrence's backward operator: its forward operator
DRAW = "streamfx_draw"  # of a random operator: the node of the step's seed, and the operator's number

# Host programs and loop bodies
JOINT = "joint"  # the name of the joint graph's node that the value is
HAS_KEYS = "has_keys"
TRACED = "streamfx_traced"  # of an operator outside of the loops: its name in the joint graph
RUN = "streamfx_run"  # the number of the region that the node belongs to
STACKED = "streamfx_stacked"  # of a loop's result: its chunks are concatenated
SAVED_FOR_ONE = "streamfx_saved_for_one"  # of an input: a loop's result that the forward graph keeps for this graph only
REDUCED = "streamfx_reduced"  # of a reduction in a loop body: the operand and the rows that are reduced
