"""Sums over rows that decay: `sums[c]` is what is left, in front of row c, of a first sum and of the rows before it.

    sums[0] = first        sums[c + 1] = exp(decays[c]) * sums[c] + rows[c]

State space models write this as a product with a matrix of weights, exp of sums of decays, and so it is written here: all rows at
once, or those of a chunk, which is handed the sum in front of it.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.flop_counter import register_flop_formula

from streamfx.ir.stateful import Stateful

_library = torch.library.Library("streamfx", "FRAGMENT")
_library.define("decayed_sums(Tensor decays, Tensor rows, Tensor? first) -> (Tensor, Tensor)")
_library.define(
    "decayed_sums_backward(Tensor? dsums, Tensor? dlast, Tensor decays, Tensor rows, Tensor? first) -> (Tensor, Tensor, Tensor)"
)


def decayed_sums(decays: Tensor, rows: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
    """decays [... n], rows [... n f], first [... f]: the sums [... n f] in front of each row, and the last [... f]."""
    _require_sizes(decays, rows, first)
    weights = _weights(decays)
    inner, started = weights[..., 1:], weights[..., :1]
    sums = inner[..., :-1, :-1] @ rows[..., :-1, :]
    last = (inner[..., -1:, :] @ rows).squeeze(-2)
    if first is not None:
        sums += started[..., :-1, :] * first.unsqueeze(-2)
        last += started[..., -1, :] * first
    return sums, last


def decayed_sums_backward(
    dsums: Tensor | None, dlast: Tensor | None, decays: Tensor, rows: Tensor, first: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of decays, rows and first, from those of the sums and of the last."""
    weights = _weights(decays)
    dsums = torch.zeros_like(rows) if dsums is None else dsums
    dlast = torch.zeros_like(rows[..., 0, :]) if dlast is None else dlast
    dlast = dlast.unsqueeze(-2)
    inner = weights[..., 1:]
    drows = inner[..., :-1, :].mT @ dsums
    drows += inner[..., -1:, :].mT * dlast
    dfirst = (weights[..., :-1, :1].mT @ dsums + weights[..., -1:, :1] * dlast).squeeze(-2)
    dweights = torch.zeros_like(weights)
    dweights[..., :-1, 1:] = dsums @ rows.mT
    dweights[..., -1:, 1:] = dlast @ rows.mT
    if first is not None:
        dweights[..., :-1, :1] = dsums @ first.unsqueeze(-1)
        dweights[..., -1:, :1] = dlast @ first.unsqueeze(-1)
    return _gradient_of_decays(dweights * weights), drows, dfirst


def _require_sizes(decays: Tensor, rows: Tensor, first: Tensor | None) -> None:
    """Nothing is repeated: fake results have the sizes of rows."""
    if decays.shape != rows.shape[:-1] or (first is not None and first.shape != rows[..., 0, :].shape):
        shapes = [None if part is None else list(part.shape) for part in (decays, rows, first)]
        raise ValueError(f"decays, rows and a first sum of {shapes} do not fit together")


def _weights(decays: Tensor) -> Tensor:
    """[c, z]: what is left in front of row c of what stands behind row z - 1; nothing for z > c."""
    own = pad(decays, (1, 0))
    count = own.shape[-1]
    below = torch.ones(count, count, dtype=torch.bool, device=own.device).tril(-1)
    totals = own.unsqueeze(-1).expand(*own.shape, count).masked_fill(~below, 0).cumsum(-2)
    return totals.masked_fill_(below.mT, -torch.inf).exp_()


def _gradient_of_decays(dtotals: Tensor) -> Tensor:
    """A decay is part of the totals of all later rows over all earlier ones."""
    return dtotals.flip(-2).cumsum(-2).flip(-2).tril(-1).sum(-1)[..., 1:]


# -- the operator that is differentiated


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    decays, rows, first = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(decays, rows, first)


def _backward(ctx: Any, dsums: Tensor | None, dlast: Tensor | None) -> tuple[Tensor | None, ...]:
    decays, rows, first = ctx.saved_tensors
    if dsums is None and dlast is None:
        return None, None, None
    ddecays, drows, dfirst = BACKWARD(dsums, dlast, decays, rows, first)
    return ddecays, drows, None if first is None else dfirst


def _like(decays: Tensor, rows: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
    _require_sizes(decays, rows, first)
    return rows.new_empty(rows.shape), rows.new_empty((*rows.shape[:-2], rows.shape[-1]))


def _gradients_like(
    dsums: Tensor | None, dlast: Tensor | None, decays: Tensor, rows: Tensor, first: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    drows, dfirst = _like(decays, rows, first)
    return decays.new_empty(decays.shape), drows, dfirst


_library.impl("decayed_sums", decayed_sums, "CompositeExplicitAutograd")
_library.impl("decayed_sums_backward", decayed_sums_backward, "CompositeExplicitAutograd")
torch.library.register_fake("streamfx::decayed_sums", _like, lib=_library)
torch.library.register_fake("streamfx::decayed_sums_backward", _gradients_like, lib=_library)
torch.library.register_autograd("streamfx::decayed_sums", _backward, setup_context=_setup, lib=_library)
DECAYED_SUMS = torch.ops.streamfx.decayed_sums.default
BACKWARD = torch.ops.streamfx.decayed_sums_backward.default


@register_flop_formula(DECAYED_SUMS.overloadpacket)
def _flops(decays: Any, rows: Any, first: Any, *_: Any, **__: Any) -> int:
    """One product of all rows with all rows."""
    return 2 * prod(rows) * int(decays[-1])


@register_flop_formula(BACKWARD.overloadpacket)
def _flops_of_gradients(dsums: Any, dlast: Any, decays: Any, rows: Any, first: Any, *_: Any, **__: Any) -> int:
    return 2 * _flops(decays, rows, first)


# -- in chunks

DECLARED = Stateful(
    name="decayed_sums",
    operators=("streamfx::decayed_sums", "streamfx::decayed_sums_backward"),
    forward=decayed_sums,
    backward=decayed_sums_backward,
    takes=("decays", "rows", "first"),
    backward_takes=("dsums", "dlast", "decays", "rows", "first"),
    rows={"decays": -1, "rows": -2},
    results=(-2, None),
    states={"first": 1},
    cotangents={"dsums": 0, "dlast": 1},
    gradients=("decays", "rows", "first"),
)
