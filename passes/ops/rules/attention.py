"""Rules of fused attention: queries keep their rows, keys are contracted."""

from __future__ import annotations

from streamfx.ir.signature import Index, Letter, LetterShape, Signature, full_axes
from streamfx.kernels.sdpa import ATTENTION, ATTENTION_BACKWARD
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


def _mask_letters(call: RuleCall, position: int) -> LetterShape:
    """Return the labels of the mask operand, aligned at the last dimension; dimensions of size one have none."""
    full: LetterShape = ((B,), (H,), (M,), (N,))
    shape = call.shapes[position]
    return tuple(full[4 - len(shape) + i] if size != 1 else () for i, size in enumerate(shape))


def _key_value_labels(call: RuleCall, query: int, key: int) -> tuple[LetterShape, LetterShape]:
    """Return the labels of keys and values. If there are as many key heads as query heads, both have the same head label."""
    if call.shapes[query][1] == call.shapes[key][1]:
        return ((B,), (H,), (N,), (D,)), ((B,), (H,), (N,), (E,))
    return KEY, VALUE


def _full_labels(key: LetterShape) -> dict[Letter, Index]:
    """Return the labels needed in full: heads only if several query heads share a key head."""
    return FULL_AXES if key is KEY else full_axes(*FULL_AXES.keys() - {H, G})


def _position_dependent(call: RuleCall) -> frozenset[Letter]:
    """Return the labels whose indices matter: query and key positions, if the causal flag compares them."""
    return frozenset({M, N}) if call.arguments()["is_causal"] else frozenset()


@rule(ATTENTION)
def attention(call: RuleCall) -> Signature:
    """Map (q, k, v, mask?) to (out, log-sum-exp)."""
    key, value = _key_value_labels(call, 0, 1)
    mask = (_mask_letters(call, 3),) if len(call.operands) == 4 else ()
    return Signature(
        (QUERY, key, value, *mask), (OUT, LSE), _full_labels(key), keys=frozenset({N}), index_dependent=_position_dependent(call)
    )


@rule(ATTENTION_BACKWARD)
def attention_backward(call: RuleCall) -> Signature:
    """Map (dout, q, k, v, out, lse, mask?) to (dq, dk, dv)."""
    key, value = _key_value_labels(call, 1, 2)
    mask = (_mask_letters(call, 6),) if len(call.operands) == 7 else ()
    return Signature(
        (OUT, QUERY, key, value, OUT, LSE, *mask),
        (QUERY, key, value),
        _full_labels(key),
        keys=frozenset({N}),
        index_dependent=_position_dependent(call),
    )
