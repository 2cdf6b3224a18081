"""Sums over rows with decay: `sums[c]` is the decayed sum, before row c, of an initial value and of all rows before c.

    sums[0] = first        sums[c + 1] = exp(decays[c]) * sums[c] + rows[c]

    decayed_sums(decays [.. n], rows [.. n f], first [.. f] or None) -> sums[0 .. n - 1] [.. n f], sums[n] [.. f]
    decayed_sums_after(decays, rows, first) -> sums[1 .. n] [.. n f], sums[n] [.. f]

Dynamo's graphs of state space models get these operators in place of a product with exp of segment sums of decays. Each
`..._backward` takes the gradients of both results (None: absent) and the operands.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from streamfx.dialect.declare import LIBRARY, declare
from streamfx.torch_private import OpOverload


def require_sizes(decays: Tensor, rows: Tensor, first: Tensor | None) -> None:
    """Raise `ValueError` if a dimension would be broadcast, because results on fake tensors have the shape of rows."""
    if decays.shape != rows.shape[:-1] or (first is not None and first.shape != rows[..., 0, :].shape):
        shapes = [None if value is None else list(value.shape) for value in (decays, rows, first)]
        raise ValueError(f"decays, rows and the first sum have incompatible shapes: {shapes}")


def _like(decays: Tensor, rows: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return uninitialized results with the shapes of the sums and of the last sum."""
    require_sizes(decays, rows, first)
    return rows.new_empty(rows.shape), rows.new_empty((*rows.shape[:-2], rows.shape[-1]))


def _gradients_like(
    dsums: Tensor | None, dlast: Tensor | None, decays: Tensor, rows: Tensor, first: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return uninitialized gradients of decays, rows and the initial sum."""
    drows, dfirst = _like(decays, rows, first)
    return decays.new_empty(decays.shape), drows, dfirst


def _flops(decays: Any, rows: Any, first: Any, *_: Any, **__: Any) -> int:
    """Count one product of all rows with all rows; the arguments are shapes."""
    return 2 * prod(rows) * int(decays[-1])


def _flops_of_gradients(dsums: Any, dlast: Any, decays: Any, rows: Any, first: Any, *_: Any, **__: Any) -> int:
    """Count two products of all rows with all rows; the arguments are shapes."""
    return 2 * _flops(decays, rows, first)


def _save_operands(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Save the operands for the backward: the `setup_context` hook of the operators' autograd formula."""
    decays, rows, first = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(decays, rows, first)


def _declare_differentiable(name: str) -> tuple[OpOverload, OpOverload]:
    """Declare the operator `name`, its backward `{name}_backward`, and the autograd formula that calls it; return both."""
    operator = declare(f"{name}(Tensor decays, Tensor rows, Tensor? first) -> (Tensor, Tensor)", _like, _flops)
    backward = declare(
        f"{name}_backward(Tensor? dsums, Tensor? dlast, Tensor decays, Tensor rows, Tensor? first) -> (Tensor, Tensor, Tensor)",
        _gradients_like,
        _flops_of_gradients,
    )

    def gradients(ctx: Any, dsums: Tensor | None, dlast: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of decays, rows and the initial sum: the operator's autograd formula."""
        decays, rows, first = ctx.saved_tensors
        if dsums is None and dlast is None:
            return None, None, None
        ddecays, drows, dfirst = backward(dsums, dlast, decays, rows, first)
        return ddecays, drows, None if first is None else dfirst

    torch.library.register_autograd(f"streamfx::{name}", gradients, setup_context=_save_operands, lib=LIBRARY)
    return operator, backward


DECAYED_SUMS, DECAYED_SUMS_BACKWARD = _declare_differentiable("decayed_sums")
SUMS_AFTER, SUMS_AFTER_BACKWARD = _declare_differentiable("decayed_sums_after")
