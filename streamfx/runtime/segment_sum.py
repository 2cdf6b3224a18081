"""Sums over rows with decay: `sums[c]` is the decayed sum, before row c, of an initial value and of all rows before c.

    sums[0] = initial        sums[c + 1] = exp(decays[c]) * sums[c] + rows[c]

State space models compute this as a product with a matrix of weights, exp of segment sums of decays. So does this
module, for all rows or for a chunk's rows, given the sum before them. A second operator returns the sums after each
row, sums[c + 1].
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.flop_counter import register_flop_formula

from streamfx.ir.scan_schema import Stateful

_library = torch.library.Library("streamfx", "FRAGMENT")


def decayed_sums(decays: Tensor, rows: Tensor, first: Tensor | None, after_row: bool = False) -> tuple[Tensor, Tensor]:
    """Return the sums [... n f] before each row, or after it if `after_row`, and the sum [... f] after the last row.

    The operands are decays [... n], rows [... n f] and the initial sum [... f].
    """
    _require_sizes(decays, rows, first)
    weights = _weights(decays)
    row_weights, first_weights = weights[..., 1:], weights[..., :1]
    sums = row_weights[..., 1:, :] @ rows if after_row else row_weights[..., :-1, :-1] @ rows[..., :-1, :]
    last = sums[..., -1, :].clone() if after_row else (row_weights[..., -1:, :] @ rows).squeeze(-2)
    if first is not None:
        sums += (first_weights[..., 1:, :] if after_row else first_weights[..., :-1, :]) * first.unsqueeze(-2)
        last += first_weights[..., -1, :] * first
    return sums, last


def decayed_sums_backward(
    dsums: Tensor | None, dlast: Tensor | None, decays: Tensor, rows: Tensor, first: Tensor | None, after_row: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of decays, rows and the initial sum, from the gradients of the sums and of the last sum."""
    weights = _weights(decays)
    dsums = torch.zeros_like(rows) if dsums is None else dsums
    dlast = torch.zeros_like(rows[..., 0, :]) if dlast is None else dlast
    dlast = dlast.unsqueeze(-2)
    if first is None:
        weights[..., :1] = 0  # a missing initial sum has no weight; an unbounded weight times zero would be NaN
    summed_rows = slice(1, None) if after_row else slice(None, -1)
    row_weights = weights[..., 1:]
    drows = row_weights[..., summed_rows, :].mT @ dsums
    drows += row_weights[..., -1:, :].mT * dlast
    dfirst = (weights[..., summed_rows, :1].mT @ dsums + weights[..., -1:, :1] * dlast).squeeze(-2)
    dweights = torch.zeros_like(weights)
    dweights[..., summed_rows, 1:] = dsums @ rows.mT
    dweights[..., -1:, 1:] += dlast @ rows.mT
    if first is not None:
        dweights[..., summed_rows, :1] = dsums @ first.unsqueeze(-1)
        dweights[..., -1:, :1] += dlast @ first.unsqueeze(-1)
    return _gradient_of_decays(dweights * weights), drows, dfirst


def _require_sizes(decays: Tensor, rows: Tensor, first: Tensor | None) -> None:
    """Raise an error if a dimension would be broadcast, because fake results have the shape of rows."""
    if decays.shape != rows.shape[:-1] or (first is not None and first.shape != rows[..., 0, :].shape):
        shapes = [None if value is None else list(value.shape) for value in (decays, rows, first)]
        raise ValueError(f"decays, rows and the first sum have incompatible shapes: {shapes}")


def _weights(decays: Tensor) -> Tensor:
    """Return [c, z]: the weight, before row c, of the sum after row z - 1; zero for z > c."""
    padded = pad(decays, (1, 0))
    count = padded.shape[-1]
    below = torch.ones(count, count, dtype=torch.bool, device=padded.device).tril(-1)
    totals = padded.unsqueeze(-1).expand(*padded.shape, count).masked_fill(~below, 0).cumsum(-2)
    return totals.masked_fill_(below.mT, -torch.inf).exp_()


def _gradient_of_decays(dtotals: Tensor) -> Tensor:
    """Sum over all pairs of an earlier and a later row, because a decay is part of each total between them."""
    return dtotals.flip(-2).cumsum(-2).flip(-2).tril(-1).sum(-1)[..., 1:]


# -- the differentiable operators


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Save the operands for the backward: autograd's context hook."""
    decays, rows, first = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(decays, rows, first)


def _like(decays: Tensor, rows: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return uninitialized results with the shapes of the sums and of the last sum."""
    _require_sizes(decays, rows, first)
    return rows.new_empty(rows.shape), rows.new_empty((*rows.shape[:-2], rows.shape[-1]))


def _gradients_like(
    dsums: Tensor | None, dlast: Tensor | None, decays: Tensor, rows: Tensor, first: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return uninitialized gradients of decays, rows and the initial sum."""
    drows, dfirst = _like(decays, rows, first)
    return decays.new_empty(decays.shape), drows, dfirst


def _flops(decays: Any, rows: Any, first: Any, *_: Any, **__: Any) -> int:
    """Count one product of all rows with all rows."""
    return 2 * prod(rows) * int(decays[-1])


def _flops_of_gradients(dsums: Any, dlast: Any, decays: Any, rows: Any, first: Any, *_: Any, **__: Any) -> int:
    """Count two products of all rows with all rows."""
    return 2 * _flops(decays, rows, first)


def _register_decayed_sums(name: str, after_row: bool) -> tuple[Any, Any, Stateful]:
    """Register the operator `name` and its backward: implementations, fake results, autograd formula and FLOPs.

    If `after_row`, each sum includes its own row. Return (the operator, its backward operator, their declaration as a
    stateful operator).
    """
    backward_name = f"{name}_backward"
    forward = partial(decayed_sums, after_row=after_row)
    backward = partial(decayed_sums_backward, after_row=after_row)
    _library.define(f"{name}(Tensor decays, Tensor rows, Tensor? first) -> (Tensor, Tensor)")
    _library.define(
        f"{backward_name}(Tensor? dsums, Tensor? dlast, Tensor decays, Tensor rows, Tensor? first) -> (Tensor, Tensor, Tensor)"
    )
    operator, backward_operator = getattr(torch.ops.streamfx, name), getattr(torch.ops.streamfx, backward_name)

    def gradients(ctx: Any, dsums: Tensor | None, dlast: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of decays, rows and the initial sum: the operator's autograd formula."""
        decays, rows, first = ctx.saved_tensors
        if dsums is None and dlast is None:
            return None, None, None
        ddecays, drows, dfirst = backward_operator.default(dsums, dlast, decays, rows, first)
        return ddecays, drows, None if first is None else dfirst

    _library.impl(name, forward, "CompositeExplicitAutograd")
    _library.impl(backward_name, backward, "CompositeExplicitAutograd")
    torch.library.register_fake(f"streamfx::{name}", _like, lib=_library)
    torch.library.register_fake(f"streamfx::{backward_name}", _gradients_like, lib=_library)
    torch.library.register_autograd(f"streamfx::{name}", gradients, setup_context=_setup, lib=_library)
    register_flop_formula(operator)(_flops)
    register_flop_formula(backward_operator)(_flops_of_gradients)
    stateful = Stateful(
        name=name,
        operators=(f"streamfx::{name}", f"streamfx::{backward_name}"),
        forward=forward,
        backward=backward,
        argument_names=("decays", "rows", "first"),
        backward_argument_names=("dsums", "dlast", "decays", "rows", "first"),
        rows={"decays": -1, "rows": -2},
        results=(-2, None),
        states={"first": 1},
        cotangents={"dsums": 0, "dlast": 1},
        gradients=("decays", "rows", "first"),
    )
    return operator.default, backward_operator.default, stateful


DECAYED_SUMS, BACKWARD, BEFORE_ROW_SCAN = _register_decayed_sums("decayed_sums", after_row=False)
SUMS_AFTER, AFTER_BACKWARD, AFTER_ROW_SCAN = _register_decayed_sums("decayed_sums_after", after_row=True)
