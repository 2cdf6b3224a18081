"""Declarations of operators with a state: sums with decay, and operators that other packages define.

No package is imported, and any may be missing.

flash-linear-attention's delta rule (fla/ops/generalized_delta_rule/dplr/backends/tilelang/chunk.py, August 2026):
rows [b t h d], state [b h k v] in float32. A flag says whether an initial state is passed; without it, the
placeholder tensor is empty. Packed sequences of several lengths are not chunked. The results after the final state
are saved for backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from streamfx.ir.scan_schema import Stateful
from streamfx.passes.ops.rules.stateful import declare
from streamfx.runtime.segment_sum import DECAYED_SUM_SCANS

ROWS = ("q", "k", "v", "a", "b", "gk")
OPTIONS = ("scale", "has_initial_state", "is_varlen", "chunk_size")
LAYOUT = ("chunk_indices", "chunk_offsets")
CONTEXT = ("h", "v_new", "qg", "kg", "ag", "bg", "w", "A_ab_inv", "A_ak", "A_qk", "A_qb")


def _late_bound(name: str) -> Callable[..., Any]:
    """Return a function of keyword arguments that calls the operator `name` ("fla::..."), looked up on each call.

    The operator exists only after its package was imported.
    """
    namespace, operator = name.split("::")
    return lambda **arguments: getattr(getattr(torch.ops, namespace), operator)(**arguments)


def _delta_rule(suffix: str, context: tuple[str, ...]) -> Stateful:
    """Return the declaration of one variant of the delta-rule operator, `fla::chunk_dplr_delta_rule_fwd<suffix>`.

    After the rows and the final state, it returns the values that backward needs: its block layout, and `context`. In `rows`
    and `results`, 1 is the dimension of rows; in the others, the result's index.
    """
    names = f"fla::chunk_dplr_delta_rule_fwd{suffix}", f"fla::chunk_dplr_delta_rule_bwd{suffix}"
    saved = (*LAYOUT, *(f"{name}_ctx" for name in context))
    return Stateful(
        name=f"delta_rule{suffix}",
        operators=names,
        forward=_late_bound(names[0]),
        backward=_late_bound(names[1]),
        argument_names=(*ROWS, "h0", "cu_seqlens", "scale", "has_initial_state", "output_final_state", "is_varlen", "chunk_size"),
        backward_argument_names=("do", "dht", *ROWS, "h0", "cu_seqlens", *saved, *OPTIONS),
        rows=dict.fromkeys(ROWS, 1),
        results=(1, None, *(None for _ in saved)),
        states={"h0": 1},
        cotangents={"do": 0, "dht": 1},
        gradients=(*ROWS, "h0"),
        saved={name: result_index for result_index, name in enumerate(saved, 2)},
        always={"has_initial_state": True, "output_final_state": True},
        only={"is_varlen": False},
        block="chunk_size",
    )


for declared in (_delta_rule("", ()), _delta_rule("_ctx", CONTEXT), *DECAYED_SUM_SCANS):
    declare(declared)
