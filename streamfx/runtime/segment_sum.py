"""Implement sums over rows with decay (`dialect/decayed_sums.py`), as a product with a matrix of weights.

    sums[0] = first        sums[c + 1] = exp(decays[c]) * sums[c] + rows[c]
    sums = weights @ [first, *rows],  weights[c, z] = exp(decays[z] + ... + decays[c - 1]) for z <= c, else 0

The weights are exp of segment sums of decays, as in state space models. Sizes: n rows, f features. The rows are those of the
sequence, or of a chunk, given the sum before them. A second operator returns the sums after each row, sums[c + 1].
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from streamfx.dialect.decayed_sums import DECAYED_SUMS, DECAYED_SUMS_BACKWARD, SUMS_AFTER, SUMS_AFTER_BACKWARD, require_sizes
from streamfx.dialect.declare import implement
from streamfx.ir.scan_schema import Stateful
from streamfx.torch_private import OpOverload


def decayed_sums(decays: Tensor, rows: Tensor, first: Tensor | None, after_row: bool = False) -> tuple[Tensor, Tensor]:
    """Return the sums [... n f] before each row, or after it if `after_row`, and the sum [... f] after the last row.

    The operands are decays [... n], rows [... n f] and the initial sum `first` [... f], None for zeros.
    """
    require_sizes(decays, rows, first)
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
    """Return the gradients of decays, rows and the initial sum.

    `dsums`, `dlast`: the gradients of both results of `decayed_sums`; None: zeros.
    """
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


def _weights(decays: Tensor) -> Tensor:
    """Return the weights [... n + 1, n + 1]: of input z (0: `first`, z: row z - 1) in the sum before row c; 0 for z > c."""
    padded = pad(decays, (1, 0))
    count = padded.shape[-1]
    below = torch.ones(count, count, dtype=torch.bool, device=padded.device).tril(-1)
    totals = padded.unsqueeze(-1).expand(*padded.shape, count).masked_fill(~below, 0).cumsum(-2)
    return totals.masked_fill_(below.mT, -torch.inf).exp_()


def _gradient_of_decays(dtotals: Tensor) -> Tensor:
    """Return the gradient [... n] of decays, from the gradient of the totals [... n + 1, n + 1], whose exp the weights are.

    A decay is part of the total of each pair of an earlier and a later row between which it is, so sum over these pairs.
    """
    return dtotals.flip(-2).cumsum(-2).flip(-2).tril(-1).sum(-1)[..., 1:]


# -- the operators' implementations


def _implement_decayed_sums(operator: OpOverload, backward_operator: OpOverload, after_row: bool) -> Stateful:
    """Implement an operator and its backward; return their declaration as a stateful operator, for chunks.

    If `after_row`, each sum includes its own row.
    """
    forward = partial(decayed_sums, after_row=after_row)
    backward = partial(decayed_sums_backward, after_row=after_row)
    implement(operator, forward)
    implement(backward_operator, backward)
    return Stateful(
        name=operator.name().removeprefix("streamfx::"),
        operators=(operator.name(), backward_operator.name()),
        forward=forward,
        backward=backward,
        argument_names=("decays", "rows", "first"),
        backward_argument_names=("dsums", "dlast", "decays", "rows", "first"),
        rows={"decays": -1, "rows": -2},
        results=(-2, None),
        states={"first": 1},
        cotangents={"dsums": 0, "dlast": 1},
        gradients=("decays", "rows", "first"),
        # otherwise the weight of earlier rows may underflow at the start of a chunk and grow large after it
        nonpositive=("decays",),
    )


DECAYED_SUM_SCANS = (
    _implement_decayed_sums(DECAYED_SUMS, DECAYED_SUMS_BACKWARD, after_row=False),
    _implement_decayed_sums(SUMS_AFTER, SUMS_AFTER_BACKWARD, after_row=True),
)
