"""Stand-ins for flash attention of many sequences in one call, with its contract: see `cuda_kernels.py`.

flash_attn/flash_api.cpp: mha_varlen_fwd and mha_varlen_bwd; rows of all sequences are [m h d], and sequence i is rows
`ends[i] .. ends[i + 1]` of the queries, and of the keys by their own ends.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from tests.support.cuda_reading import HALF, check_heads, gradients, is_aligned, lse_type, plain, read

Ends = list[int]
MOST = 256  # the widest head


def checked_ends(q: Tensor, k: Tensor, ends_q: Tensor, ends_k: Tensor, most_rows: int, most_keys: int) -> tuple[Ends, Ends]:
    """Return the ends that the kernel reads; it checks only type, shape and layout."""
    for ends, most, heads in ((ends_q, most_rows, q), (ends_k, most_keys, k)):
        assert ends.dtype == torch.int32 and ends.is_contiguous() and ends.dim() == 1 and ends.device == q.device
        own = ends.tolist()
        assert own[0] == 0 and own[-1] == len(heads), "rows of no sequence are neither computed nor zeroed"
        # mha_varlen_fwd: no block begins after the greatest length
        assert all(0 <= stop - start <= most for start, stop in pairwise(own))
    assert ends_q.shape == ends_k.shape and len(ends_q) > 1, "batch size must be positive"
    assert most_rows > 0 and most_keys > 0
    return ends_q.tolist(), ends_k.tolist()


def _check(q: Tensor, k: Tensor, v: Tensor, scale: float | None, left: int, right: int) -> tuple[bool, int]:
    """Whether there is a causal mask, and how many keys before its own a row sees, or -1."""
    check_heads(_heads(q), _heads(k), _heads(v), HALF, 8)
    assert q.shape[2] == v.shape[2] <= MOST and q.shape[1] % k.shape[1] == 0 and (scale is None or scale > 0)
    assert right in (0, -1), "other windows are not asked for"
    assert right == 0 or left == -1  # set_params_fprop: else a row sees all later keys
    return right == 0, left


def flash(
    q: Tensor, k: Tensor, v: Tensor, rows: Ends, keys: Ends, scale: float | None, left: int, right: int
) -> tuple[Tensor, ...]:
    causal, left = _check(q, k, v, scale, left, right)
    # mha_varlen_fwd: seqlenq_ngroups_swapped: grouped heads of single rows have another layout, unless there is a right end
    assert right == 0 or max(stop - start for start, stop in pairwise(rows)) > 1
    out = torch.full_like(q, float("nan"))  # empty_like(q)
    lse = q.new_full((q.shape[1], len(q)), float("nan"), dtype=lse_type(q))  # unpadded: [heads, total_q]
    for own, others in _sequences(rows, keys):
        made = plain(_heads(q[own]), _heads(k[others]), _heads(v[others]), None, causal, scale, last=True, left=left)
        out[own], lse[:, own] = made[0][0].transpose(0, 1), made[1][0]
    state, unused = torch.empty(2, dtype=torch.uint64), torch.empty((), dtype=torch.uint64)
    return out, lse, state, unused, q.new_empty(0)


def flash_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rows: Ends, keys: Ends, seed: Tensor, offset: Tensor,
    scale: float | None, left: int, right: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    causal, left = _check(q, k, v, scale, left, right)
    assert (seed.dtype, tuple(seed.shape), offset.dtype, tuple(offset.shape)) == (torch.uint64, (2,), torch.uint64, ())
    assert g.shape == out.shape == (*q.shape[:2], v.shape[2]) and g.dtype == out.dtype == q.dtype
    assert is_aligned(g.contiguous(), 8) and is_aligned(out.contiguous(), 8)
    # mha_varlen_bwd: softmax_lse.data_ptr(), of [h m] floats one after another, with neither type nor strides looked at
    m, h = q.shape[:2]
    assert lse.dtype == lse_type(q) and lse.device == q.device
    lse = read(lse, (h, m), (m, 1))
    dq, dk, dv = (torch.full_like(item, float("nan")) for item in (q, k, v))  # empty_like
    for own, others in _sequences(rows, keys):
        heads = _heads(g[own]), _heads(q[own]), _heads(k[others]), _heads(v[others])
        made = gradients(*heads, _heads(out[own]), lse[:, own][None], None, causal, scale, last=True, left=left)
        for total, part, place in zip((dq, dk, dv), made, (own, others, others), strict=True):
            total[place] = part[0].transpose(0, 1)
    return dq, dk, dv


def _sequences(rows: Ends, keys: Ends) -> Iterator[tuple[slice, slice]]:
    for own, others in zip(pairwise(rows), pairwise(keys), strict=True):
        assert own[0] == own[1] or others[0] < others[1], "its log-sum-exp is infinity, whose gradients nobody looked at"
        if own[0] < own[1]:
            yield slice(*own), slice(*others)


def _heads(rows: Tensor) -> Tensor:
    return rows.transpose(0, 1).unsqueeze(0)
