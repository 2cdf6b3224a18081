"""Axis rules of fused attention: queries keep their rows, keys are contracted.

A rule returns a `Signature`: axis labels (integers) for each dimension of each operand and result. Dimensions with one label
share an axis, and a dimension of size one has none: `()`. A label in `index` is needed in full: the operator cannot run on a
slice of that axis. `keys` marks the label of key positions, of which a chunk of queries reads the rows that it sees.
"""

from __future__ import annotations

from streamfx.dialect.attention import ATTENTION, ATTENTION_BACKWARD
from streamfx.ir.signature import AxisLabel, Index, LabelShape, Signature, full_axes
from streamfx.passes.ops.rules.registry import RuleCall, rule

# axis labels: batch, query heads, query positions, head width, key heads, key positions, width of values
B, H, M, D, G, N, E = range(7)
FULL_AXES = full_axes(D, E, H, G, N)  # softmax normalizes over keys: partial results do not add up
QUERY, KEY, VALUE, OUT, LSE = (
    ((B,), (H,), (M,), (D,)),
    ((B,), (G,), (N,), (D,)),
    ((B,), (G,), (N,), (E,)),
    ((B,), (H,), (M,), (E,)),
    ((B,), (H,), (M,)),
)


def _mask_labels(call: RuleCall, operand_index: int) -> LabelShape:
    """Return the axis labels of the mask, the operand with this index: (batch, heads, queries, keys) or its last dimensions.

    Dimensions of size one are broadcast and have no label.
    """
    all_labels: LabelShape = ((B,), (H,), (M,), (N,))
    shape = call.shapes[operand_index]
    return tuple(all_labels[4 - len(shape) + i] if size != 1 else () for i, size in enumerate(shape))


def _key_value_labels(call: RuleCall, query_index: int, key_index: int) -> tuple[LabelShape, LabelShape]:
    """Return the axis labels of keys and values; `query_index`, `key_index`: which operands are queries and keys.

    With as many key heads as query heads, the head label is the queries' (H); with fewer (grouped queries), it is G.
    """
    if call.shapes[query_index][1] == call.shapes[key_index][1]:  # dimension 1: heads
        return ((B,), (H,), (N,), (D,)), ((B,), (H,), (N,), (E,))
    return KEY, VALUE


def _full_labels(key: LabelShape) -> dict[AxisLabel, Index]:
    """Return the labels that attention needs in full, given the labels of keys: head widths, and key positions.

    Heads are needed in full only if several query heads share a key head, so that `key` has the label G (`KEY`).
    """
    return FULL_AXES if key is KEY else full_axes(*FULL_AXES.keys() - {H, G})


def _position_dependent(call: RuleCall) -> frozenset[AxisLabel]:
    """Return the labels along which a row's index changes the result: query and key positions, if attention is causal."""
    return frozenset({M, N}) if call.arguments()["is_causal"] else frozenset()


@rule(ATTENTION)
def attention(call: RuleCall) -> Signature:
    """Axis rule of attention: (q, k, v, mask?) -> (out, log-sum-exp), with labels for all dimensions."""
    key, value = _key_value_labels(call, query_index=0, key_index=1)
    mask = (_mask_labels(call, operand_index=3),) if len(call.operands) == 4 else ()
    return Signature(
        (QUERY, key, value, *mask), (OUT, LSE), _full_labels(key), keys=frozenset({N}), index_dependent=_position_dependent(call)
    )


@rule(ATTENTION_BACKWARD)
def attention_backward(call: RuleCall) -> Signature:
    """Axis rule of attention's backward: (dout, q, k, v, out, log-sum-exp, mask?) -> (dq, dk, dv)."""
    key, value = _key_value_labels(call, query_index=1, key_index=2)
    mask = (_mask_labels(call, operand_index=6),) if len(call.operands) == 7 else ()
    return Signature(
        (OUT, QUERY, key, value, OUT, LSE, *mask),
        (QUERY, key, value),
        _full_labels(key),
        keys=frozenset({N}),
        index_dependent=_position_dependent(call),
    )
