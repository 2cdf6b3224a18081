"""Fused attention: queries keep their rows, keys are contracted."""

from __future__ import annotations

from streamfx.ir.signature import Index, Letter, LetterShape, Signature, whole
from streamfx.kernels.sdpa import ATTENTION, ATTENTION_BACKWARD
from streamfx.passes.ops.rules.registry import RuleCall, rule

# letters: batch, query heads, query rows, width, key heads, key rows, width of the values
B, H, M, D, G, N, E = range(7)
WHOLE = whole(D, E, H, G, N)  # keys are normalised over: parts of them do not add up
QUERY, KEY, VALUE, OUT, LSE = (
    ((B,), (H,), (M,), (D,)),
    ((B,), (G,), (N,), (D,)),
    ((B,), (G,), (N,), (E,)),
    ((B,), (H,), (M,), (E,)),
    ((B,), (H,), (M,)),
)


def _mask_letters(call: RuleCall, position: int) -> LetterShape:
    full: LetterShape = ((B,), (H,), (M,), (N,))
    shape = call.shapes[position]
    return tuple(full[4 - len(shape) + i] if size != 1 else () for i, size in enumerate(shape))


def _key_side(call: RuleCall, query: int, key: int) -> tuple[LetterShape, LetterShape]:
    """Letters of K and V; with as many key heads as query heads they are the same heads."""
    if call.shapes[query][1] == call.shapes[key][1]:
        return ((B,), (H,), (N,), (D,)), ((B,), (H,), (N,), (E,))
    return KEY, VALUE


def _whole(key: LetterShape) -> dict[Letter, Index]:
    """Heads that share keys are needed together; heads with keys of their own have nothing to do with each other."""
    return WHOLE if key is KEY else whole(*WHOLE.keys() - {H, G})


def _placed(call: RuleCall) -> frozenset[Letter]:
    """The causal flag compares the numbers of rows and keys."""
    return frozenset({M, N}) if call.arguments()["is_causal"] else frozenset()


@rule(ATTENTION)
def attention(call: RuleCall) -> Signature:
    """(q, k, v, mask?) to (out, log-sum-exp)."""
    key, value = _key_side(call, 0, 1)
    mask = (_mask_letters(call, 3),) if len(call.operands) == 4 else ()
    return Signature((QUERY, key, value, *mask), (OUT, LSE), _whole(key), keys=frozenset({N}), placed=_placed(call))


@rule(ATTENTION_BACKWARD)
def attention_backward(call: RuleCall) -> Signature:
    """(dout, q, k, v, out, lse, mask?) to (dq, dk, dv)."""
    key, value = _key_side(call, 1, 2)
    mask = (_mask_letters(call, 6),) if len(call.operands) == 7 else ()
    return Signature(
        (OUT, QUERY, key, value, OUT, LSE, *mask),
        (QUERY, key, value),
        _whole(key),
        keys=frozenset({N}),
        placed=_placed(call),
    )
