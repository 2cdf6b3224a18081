"""Stand-ins for CUDA's fused attention, which run without a CUDA device and hold the kernels' contracts.

A stand-in refuses what its kernel refuses, reads memory by the strides that its kernel computes, whatever a tensor's own are,
and returns what its kernel returns, in the layout that it returns it in. Each check names the place in PyTorch's sources that
says so, under aten/src/ATen/native/transformers/cuda unless a path is given. Only the arithmetic is another: in float64, which
stands for a half type or for single precision, as `half` says.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from streamfx.kernels import cuda_attention, cuda_cudnn, plain_attention, sdpa
from streamfx.kernels.attention_call import AttentionCall
from streamfx.kernels.device_kinds import DeviceKind
from tests.support import cuda_documents
from tests.support.cuda_reading import HALF, SINGLE, by_rows, check_heads, gradients, is_aligned, like, lse_type, plain, read
from tests.support.tables import named_cases

Heads = tuple[Tensor, Tensor, Tensor]  # queries, keys and values


@contextmanager
def in_their_place(half: bool, cudnn: bool = False) -> Iterator[None]:
    """CUDA's kernels on the CPU, with float64 for a half type, or for single precision; with `cudnn` on a device that prefers it,
    for multiples of 4 rows.
    """
    library = torch.library.Library("aten", "IMPL")
    for name, function in STAND_INS.items():
        library.impl(name, function, "CPU")
    with pytest.MonkeyPatch.context() as patch:
        (HALF if half else SINGLE).add(torch.float64)
        patch.setattr(cuda_attention, "FLASH_TYPES", HALF)
        patch.setattr(cuda_attention, "flash_width", lambda device: 256)
        patch.setattr(cuda_cudnn, "TYPES", HALF)
        patch.setattr(cuda_cudnn, "TILE_ROWS", 4)
        patch.setattr(cuda_cudnn, "device_kind", lambda device: DeviceKind("cuda", (9, 0), True, has_cudnn=cudnn))
        PLANS.clear()
        cuda = sdpa.KERNELS["cuda"]
        patch.setitem(sdpa.KERNELS, "cpu", cuda._replace(types=HALF | SINGLE, has_kernels=lambda _: True))
        try:
            yield
        finally:
            (HALF if half else SINGLE).discard(torch.float64)
            library._destroy()


def drawn(batch: int, rows: int, keys: int, heads: int = 4, groups: int = 2, width: int = 8, values: int = 0) -> Heads:
    """Queries, keys and values as a model's views have them: heads of one row side by side."""
    torch.manual_seed(0)
    sizes = ((heads, rows, width), (groups, keys, width), (groups, keys, values or width))
    q, k, v = (torch.randn(batch, n, own, size, dtype=torch.float64).transpose(1, 2) for own, n, size in sizes)
    return q, k, v


def check(run: Any, heads: Heads, how: tuple[Any, ...], truth: tuple[Any, ...]) -> None:
    """What `run` makes of heads, forth and back, is what plain operators make of them that are told `truth`."""
    call = AttentionCall(*heads, *truth)
    found, wanted = run.forward(*heads, *how), plain_attention.forward(call)
    torch.testing.assert_close(found, wanted)
    gradient = torch.randn_like(found[0])
    made = run.backward(gradient, *heads, *found, *how)
    torch.testing.assert_close(made, plain_attention.backward(call, gradient, *wanted))


def check_kernels(call: AttentionCall) -> None:
    """CUDA's kernels compute what plain operators compute."""
    found, wanted = cuda_attention.forward(call), plain_attention.forward(call)
    torch.testing.assert_close(found, wanted)
    gradient = torch.randn_like(found[0])
    made = cuda_attention.backward(call, gradient, *found)
    torch.testing.assert_close(made, plain_attention.backward(call, gradient, *wanted))


Fault = Callable[..., Any]  # of the function that is right, and its arguments


@contextmanager
def wrong(trial: Any, owner: Any, names: tuple[str, str], fault: Fault | None, back: Fault | None) -> Iterator[None]:
    """A kernel that is wrong forth or back, whatever `trial` knew of it."""
    trial.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        for name, own in zip(names, (fault, back), strict=True):
            if own is not None:
                patch.setattr(owner, name, partial(own, getattr(owner, name)))
        try:
            yield
        finally:
            trial.cache_clear()


def refuses(*_: Any) -> Any:
    raise RuntimeError("this build does not support it")


def another_gradient(real: Callable[..., Any], *given: Any, by: float = 1.1) -> Any:
    dq, dk, dv = real(*given)
    return dq, dk * by, dv


# -- flash attention


def _check_flash(q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool, scale: float | None) -> bool:
    """Whether there is a causal mask. flash_attn/flash_api.cpp: mha_fwd, mha_bwd; kernel_traits.h: loads of 16 bytes."""
    check_heads(q, k, v, HALF, 8)
    assert q.shape[3] == v.shape[3] <= 256 and q.shape[1] % k.shape[1] == 0
    assert q.numel() and k.numel() and dropout == 0
    # flash_attn/softmax.h: scale_apply_exp2 takes the greatest score before they are scaled: it has to stay the greatest
    assert scale is None or scale > 0
    return causal and q.shape[2] != 1  # "causal=true is the same as causal=false in this case"


def flash(
    q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, causal: bool = False, debug: bool = False, *, scale: Any = None
) -> Any:
    causal = _check_flash(q, k, v, dropout, causal, scale)
    out, lse = plain(q, k, v, None, causal, scale, last=True)  # flash_attn/mask.h: aligned at the last row
    # mha_fwd: rng_state and _unused; out = empty_like(q)
    state, unused = torch.empty(2, dtype=torch.uint64), torch.empty((), dtype=torch.uint64)
    return like(q, out), lse.contiguous(), None, None, q.shape[2], k.shape[2], state, unused, q.new_empty(0)


def flash_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ends_q: Any, ends_k: Any, rows: int, keys: int,
    dropout: float, causal: bool, seed: Tensor, offset: Tensor, *, scale: Any = None,
) -> Any:  # fmt: skip
    causal = _check_flash(q, k, v, dropout, causal, scale)
    return _flash_gradients(g, q, k, v, out, lse, ends_q, ends_k, rows, keys, causal, seed, offset, scale)


def _flash_gradients(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ends_q: Any, ends_k: Any, rows: int, keys: int,
    causal: bool, seed: Tensor, offset: Tensor, scale: Any, left: int = -1,
) -> Any:  # fmt: skip
    assert ends_q is None and ends_k is None and (rows, keys) == (q.shape[2], k.shape[2])
    assert (seed.dtype, tuple(seed.shape), offset.dtype, tuple(offset.shape)) == (torch.uint64, (2,), torch.uint64, ())
    # mha_bwd: CHECK_SHAPE(out), CHECK_SHAPE(dout), their types; attention_backward.cu: both are made contiguous
    assert g.shape == out.shape == (*q.shape[:3], v.shape[3]) and g.dtype == out.dtype == q.dtype
    assert is_aligned(g.contiguous(), 8) and is_aligned(out.contiguous(), 8)
    # mha_bwd: softmax_lse.data_ptr(), of [b h m] floats one after another, with neither type nor strides looked at
    b, h, m = q.shape[:3]
    assert lse.dtype == lse_type(q) and lse.device == q.device
    lse = read(lse, (b, h, m), (h * m, m, 1))
    dq, dk, dv = gradients(g, q, k, v, out, lse, None, causal, scale, last=True, left=left)
    return like(q, dq), like(k, dk), like(v, dv)  # mha_bwd: empty_like


def _seen_left(q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool, scale: Any, left: Any, right: Any) -> int:
    """How many keys before its own a row sees, or -1. flash_attn/flash_api.cpp: mha_fwd: windows as long as the keys are none; a
    negative one is unbounded, and a causal flag is lost where there is one row alone: the right end has to be given."""
    _check_flash(q, k, v, dropout, causal, scale)
    assert right == 0 and left is not None and left >= 0 and not causal
    return -1 if left >= k.shape[2] else left


def flash_window(
    q: Tensor, k: Tensor, v: Tensor, ends_q: Any, ends_k: Any, rows: int, keys: int, dropout: float, causal: bool, debug: bool, *,
    scale: Any = None, window_size_left: Any = None, window_size_right: Any = None,
) -> Any:  # fmt: skip
    """attention.cu: _flash_attention_forward, of [b m h d], or of documents."""
    if ends_q is not None:
        ends = cuda_documents.checked_ends(q, k, ends_q, ends_k, rows, keys)
        assert not causal and not debug and dropout == 0
        return cuda_documents.flash(q, k, v, *ends, scale, window_size_left, window_size_right)
    q, k, v = (item.transpose(1, 2) for item in (q, k, v))
    left = _seen_left(q, k, v, dropout, causal, scale, window_size_left, window_size_right)
    assert ends_q is None and ends_k is None and (rows, keys) == (q.shape[2], k.shape[2]) and not debug
    out, lse = plain(q, k, v, None, True, scale, last=True, left=left)
    state, unused = torch.empty(2, dtype=torch.uint64), torch.empty((), dtype=torch.uint64)
    return like(q, out).transpose(1, 2), lse.contiguous(), state, unused, q.new_empty(0)


def flash_window_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ends_q: Any, ends_k: Any, rows: int, keys: int,
    dropout: float, causal: bool, seed: Tensor, offset: Tensor, *, scale: Any = None,
    window_size_left: Any = None, window_size_right: Any = None,
) -> Any:  # fmt: skip
    """attention_backward.cu: _flash_attention_backward, of [b m h d], or of documents."""
    if ends_q is not None:
        ends = cuda_documents.checked_ends(q, k, ends_q, ends_k, rows, keys)
        assert not causal and dropout == 0
        window = window_size_left, window_size_right
        return cuda_documents.flash_backward(g, q, k, v, out, lse, *ends, seed, offset, scale, *window)
    g, q, k, v, out = (item.transpose(1, 2) for item in (g, q, k, v, out))
    left = _seen_left(q, k, v, dropout, causal, scale, window_size_left, window_size_right)
    made = _flash_gradients(g, q, k, v, out, lse, ends_q, ends_k, rows, keys, True, seed, offset, scale, left)
    return tuple(item.transpose(1, 2) for item in made)


# -- memory-efficient attention


def _alignment(q: Tensor) -> int:
    """Elements. sdp_utils.cpp: minimum_gemm_alignment and check_data_ptr_alignment_mem_efficient, from sm80 on."""
    return 8 if q.dtype in HALF else 4


def _check_efficient(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> None:
    """attention.cu: _efficient_attention_forward; mem_eff_attention/kernel_forward.h: check_supported."""
    check_heads(q, k, v, HALF | SINGLE, _alignment(q))  # gemm_kernel_utils.h: DISPATCH_TYPES
    assert q.shape[1] == k.shape[1] and dropout == 0
    assert q.numel() and k.numel()  # kernel_backward.h: num_queries > 0, num_keys > 0


def _check_bias(bias: Tensor | None, q: Tensor, k: Tensor) -> None:
    """attention_backward.cu: "attn_bias: wrong shape"; kernel_backward.h: check_supported."""
    if bias is None:
        return
    assert tuple(bias.shape) == (*q.shape[:3], k.shape[2]) and bias.dtype == q.dtype and bias.stride(-1) == 1
    for size, stride in zip(bias.shape[:-1], bias.stride()[:-1], strict=True):
        assert size <= 1 or stride % _alignment(q) == 0, "attn_bias is not correctly aligned"
    assert is_aligned(bias, _alignment(q))  # transform/tile_smem_loader.h: loads of 16 bytes
    # kernel_backward.h: MatmulQK::BiasLoader; the load of the last keys brings what lies behind them, which is added as well
    whole = -(-k.shape[2] // _alignment(q)) * _alignment(q)
    behind = read(bias, (*bias.shape[:3], whole), bias.stride())[..., k.shape[2] :]
    assert bool(behind.isfinite().all())


def efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, with_lse: bool, dropout: float = 0.0, causal: bool = False, *,
    scale: Any = None,
) -> Any:  # fmt: skip
    _check_efficient(q, k, v, dropout)
    _check_bias(bias, q, k)
    assert with_lse
    out, lse = plain(q, k, v, bias, causal, scale)  # attention.cu: CausalFromTopLeft
    lse = F.pad(lse, (0, -lse.shape[2] % 32), value=float("inf"))  # kernel_forward.h: kAlignLSE
    return by_rows(out), lse, torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)


def efficient_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, seed: Tensor, offset: Tensor,
    dropout: float, wanted: list[bool], causal: bool = False, *, scale: Any = None,
) -> Any:  # fmt: skip
    _check_efficient(q, k, v, dropout)
    _check_bias(bias, q, k)
    assert wanted == [True, True, True, False]
    # attention_backward.cu: grad_out and out are taken for what query is, whatever their types; grad_out is made contiguous
    assert g.shape == out.shape == (*q.shape[:3], v.shape[3]) and g.dtype == out.dtype == q.dtype
    assert is_aligned(g.contiguous(), _alignment(q)) and is_aligned(out, _alignment(q))
    rows = _rows_of_lse(lse, q)
    dq, dk, dv = gradients(g, q, k, v, _out_as_read(out), rows, bias, causal, scale)
    return by_rows(dq), by_rows(dk), by_rows(dv), None  # attention_backward.cu: at::empty(query.sizes())


BOTTOM_RIGHT = 2  # kernel_forward.h: CustomMaskType


def _window_of(mask_type: int, window: int | None) -> int:
    """How many keys before its own a row sees, or -1. kernel_forward.h: attention_kernel counts a row's own key."""
    assert mask_type == BOTTOM_RIGHT and (window is None or window > 0)
    return -1 if window is None else window - 1


def efficient_last(
    q: Tensor, k: Tensor, v: Tensor, bias: Any, ends_q: Any, ends_k: Any, rows: Any, keys: Any, dropout: float, mask_type: int,
    with_lse: bool = False, *, scale: Any = None, seqlen_k: Any = None, window_size: int | None = None,
) -> Any:  # fmt: skip
    """attention.cu: _efficient_attention_forward, of [b m h d]."""
    left = _window_of(mask_type, window_size)
    assert bias is None and ends_q is None and ends_k is None and rows is None and keys is None and with_lse
    heads = [item.transpose(1, 2) for item in (q, k, v)]
    _check_efficient(heads[0], heads[1], heads[2], dropout)
    assert q.shape[1] <= k.shape[1] and (scale is None or scale > 0)  # kernel_forward.h: iterative_softmax
    out, lse = plain(heads[0], heads[1], heads[2], None, True, scale, last=True, left=left)
    lse = F.pad(lse, (0, -lse.shape[2] % 32), value=float("inf"))  # kernel_forward.h: kAlignLSE
    seed = torch.zeros((), dtype=torch.int64)
    return by_rows(out).transpose(1, 2), lse, seed, seed.clone(), q.shape[1], k.shape[1]


def efficient_last_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Any, out: Tensor, ends_q: Any, ends_k: Any, rows: int, keys: int,
    lse: Tensor, dropout: float, seed: Tensor, offset: Tensor, mask_type: int, bias_grad: bool, *, scale: Any = None,
    num_splits_key: Any = None, window_size: int | None = None, shared_storage_dqdkdv: bool = False,
) -> Any:  # fmt: skip
    """attention_backward.cu: _efficient_attention_backward, of [b m h d]."""
    left = _window_of(mask_type, window_size)
    assert bias is None and ends_q is None and ends_k is None and not bias_grad and (rows, keys) == (q.shape[1], k.shape[1])
    g, q, k, v, out = (item.transpose(1, 2) for item in (g, q, k, v, out))
    _check_efficient(q, k, v, dropout)
    assert g.shape == out.shape == (*q.shape[:3], v.shape[3]) and g.dtype == out.dtype == q.dtype
    assert is_aligned(g.transpose(1, 2).contiguous(), _alignment(q)) and is_aligned(out, _alignment(q))
    made = gradients(g, q, k, v, _out_as_read(out), _rows_of_lse(lse, q), None, True, scale, last=True, left=left)
    dq, dk, dv = (by_rows(item).transpose(1, 2) for item in made)  # attention_backward.cu: at::empty(query.sizes())
    return dq, dk, dv, None


def _out_as_read(out: Tensor) -> Tensor:
    """kernel_backward.h: o_strideM() is head_dim_value * num_heads, and an element follows the other. The kernels of half types
    read it so (kKernelComputesDelta); for single precision, attention_backward.cu computes delta from the tensor."""
    if out.dtype not in HALF:
        return out
    b, h, m, e = out.shape
    return read(out, (b, h, m, e), (out.stride(0), out.stride(1), h * e, 1))


def _rows_of_lse(lse: Tensor, q: Tensor) -> Tensor:
    """mma_from_smem.h: accumApplyLSEToSmem reads rows up to a multiple of 32, with the strides of batch and head."""
    b, h, m = q.shape[:3]
    assert lse.dtype == lse_type(q)  # attention_backward.cu: a pointer to floats
    assert h <= 1 or lse.stride(1) % 8 == 0, "LSE is not correctly aligned (strideH)"  # kernel_backward.h: check_supported
    assert b <= 1 or lse.stride(0) % 8 == 0, "LSE is not correctly aligned (strideB)"
    assert is_aligned(lse, 4)
    seen = read(lse, (b, h, -(-m // 32) * 32), (lse.stride(0), lse.stride(1), 1))
    # kernel_forward.h: "we pad logsumexp with inf, this avoids a few bound checks"
    assert bool((seen[:, :, m:] == float("inf")).all())
    return seen[:, :, :m]


# -- cuDNN, where paths are under aten/src/ATen/native/cudnn

# MHA.cpp: mhagraphbackwardcache. A plan is found by the sizes and strides of queries, keys and values, and fixes those of the
# result,
# its gradient and the log-sum-exp as they were when it was built.
PLANS: dict[Any, Any] = {}


def _check_cudnn(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> None:
    """sdp_utils.cpp: check_cudnn_tensor_shapes, check_dtypes_low_precision; MHA.cpp: all strides."""
    check_heads(q, k, v, HALF, 8)
    assert q.shape[1] % k.shape[1] == 0 and q.numel() and k.shape[2] != 1 and dropout == 0


def cudnn(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, with_lse: bool, dropout: float = 0.0, causal: bool = False,
    debug: bool = False, *, scale: Any = None,
) -> Any:  # fmt: skip
    _check_cudnn(q, k, v, dropout)
    out, lse = plain(q, k, v, bias, causal, scale)  # build_graph: set_causal_mask aligns at the first row and key
    state = torch.empty((), dtype=torch.int64)
    # MHA.cpp: alloc_with_matching_layout; attention.cu: the log-sum-exp has a dimension more
    return like(q, out), lse.unsqueeze(-1).contiguous(), None, None, q.shape[2], k.shape[2], state, state.clone(), q.new_empty(0)


def cudnn_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seed: Any, offset: Any, bias: Tensor | None,
    ends_q: Any, ends_k: Any, rows: int, keys: int, dropout: float, causal: bool, *, scale: Any = None,
) -> Any:  # fmt: skip
    _check_cudnn(q, k, v, dropout)
    assert bias is None and ends_q is None and ends_k is None and (rows, keys) == (q.shape[2], k.shape[2])
    assert g.dtype == out.dtype == q.dtype and lse.dtype == lse_type(q) and g.stride(-1) == out.stride(-1) == 1
    assert all(is_aligned(item, 8) for item in (g, out))
    sizes = (*q.shape[:3], v.shape[3]), (*q.shape[:3], v.shape[3]), (*q.shape[:3], 1)
    assert (tuple(g.shape), tuple(out.shape), tuple(lse.shape)) == sizes
    key = causal, *(part for item in (q, k, v) for part in (tuple(item.shape), item.stride()))
    plan = PLANS.setdefault(key, tuple(item.stride() for item in (g, out, lse)))
    g, out, lse = (read(item, size, strides) for item, size, strides in zip((g, out, lse), sizes, plan, strict=True))
    dq, dk, dv = gradients(g, q, k, v, out, lse.squeeze(-1), None, causal, scale)
    return torch.empty_like(q).copy_(dq), torch.empty_like(k).copy_(dk), torch.empty_like(v).copy_(dv)


STAND_INS: dict[str, Callable[..., Any]] = named_cases("stand-ins", globals())
