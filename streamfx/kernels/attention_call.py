"""One call of attention, as all kernels take it: the operands, the mask and the scale.

Each kernel has two functions. `forward(call)` returns the output [b h m e] and the log-sum-exp [b h m]. `backward(call,
gradient, out, lse)` returns the gradients of queries, keys and values; `gradient` is the gradient of the output, `out` and
`lse` are the results of `forward`.

Sizes: b batch, h query heads, g heads of keys and values (each shared by h / g query heads), m queries, n keys, d and e widths
of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from torch import Tensor

Result: TypeAlias = "tuple[Tensor, Tensor]"  # output and log-sum-exp
Gradients: TypeAlias = "tuple[Tensor, Tensor, Tensor]"  # with respect to queries, keys and values


@dataclass(frozen=True)
class BottomRightCausal:
    """A causal mask that is aligned at the last query and the last key.

    Unless `left` is None, a query also sees at most `left` keys before its own.
    """

    left: int | None = None


@dataclass(frozen=True)
class Varlen:
    """Consecutive documents: rows `rows[i] .. rows[i + 1]` see keys `keys[i] .. keys[i + 1]`.

    If `causal`, the rows see these keys as under `BottomRightCausal(left)`; otherwise they see all of them.
    """

    rows: tuple[int, ...]
    keys: tuple[int, ...]
    causal: bool = True
    left: int | None = None


BOTTOM_RIGHT: Final = BottomRightCausal()
Causal: TypeAlias = bool | BottomRightCausal | Varlen
"""False: all keys are visible. True: query i sees keys 0 .. i. BOTTOM_RIGHT: the last query sees all keys, each query before it
one fewer."""


class AttentionCall(NamedTuple):
    """The attention of queries [b h m d] over keys [b g n d] and values [b g n e].

    `bias` (at most [b h m n]) is added to the scores, and `scale` multiplies them; None: 1 / sqrt(d).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None = None
    causal: Causal = False
    scale: float | None = None


def for_all_heads(call: AttentionCall) -> AttentionCall:
    """Return the call with keys and values repeated for the h heads of the queries."""
    heads = call.query.shape[1]
    key, value = (
        operand if operand.shape[1] == heads else operand.repeat_interleave(heads // operand.shape[1], 1)
        for operand in (call.key, call.value)
    )
    return call._replace(key=key, value=value)


def for_groups(gradient: Tensor, groups: int) -> Tensor:
    """Return a gradient of keys or values [b h n d], summed over the query heads that share them: [b g n d]; `groups` is g."""
    return gradient if gradient.shape[1] == groups else gradient.unflatten(1, (groups, -1)).sum(2)
