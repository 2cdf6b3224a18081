"""Fused attention of CUDA, without a CUDA device: stand-ins with the kernels' contracts run in the kernels' places.

A stand-in refuses what the kernel would refuse (a bias that is not aligned, a log-sum-exp of another length), so that what is
tested is all but the kernels' arithmetic: recognising their operators, and calling them on chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from streamfx.runtime import kernels
from tests.support.tracing import compare_function, traced

aten = torch.ops.aten
HEAD = 8


def scores_of(query: Tensor, key: Tensor, bias: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias
    if causal:
        assert query.shape[2] == key.shape[2], "flash kernels align at the last row, others at the first: only squares agree"
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    return scores


def plain(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, scale: float | None) -> tuple[Any, Any]:
    key, value = (item.repeat_interleave(query.shape[1] // item.shape[1], 1) for item in (key, value))
    scores = scores_of(query, key, bias, causal, scale)
    lse = scores.logsumexp(-1)
    return (scores - lse.unsqueeze(-1)).exp() @ value, lse


def gradients(g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Any, causal: bool, scale: Any) -> Any:
    groups, each = k.shape[1], q.shape[1] // k.shape[1]
    key, value = (item.repeat_interleave(each, 1) for item in (k, v))
    weights = (scores_of(q, key, bias, causal, scale) - lse.unsqueeze(-1)).exp()
    inner = weights * (g @ value.transpose(-1, -2) - (g * out).sum(-1, keepdim=True))
    inner = inner * (q.shape[-1] ** -0.5 if scale is None else scale)
    dk, dv = inner.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ g
    return inner @ key, *(item.unflatten(1, (groups, each)).sum(2) for item in (dk, dv))


def flash(
    q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, causal: bool = False, debug: bool = False, *, scale: Any = None
) -> Any:
    assert dropout == 0 and not debug and q.shape[-1] == v.shape[-1]
    assert all(item.stride(-1) == 1 for item in (q, k, v))
    out, lse = plain(q, k, v, None, causal, scale)
    state, unused = torch.empty(2, dtype=torch.uint64), torch.empty((), dtype=torch.uint64)
    return out, lse, None, None, q.shape[2], k.shape[2], state, unused, q.new_empty(0)


def flash_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ends_q: Any, ends_k: Any, rows: int, keys: int,
    dropout: float, causal: bool, seed: Tensor, offset: Tensor, *, scale: Any = None,
) -> Any:  # fmt: skip
    assert ends_q is None and ends_k is None and (rows, keys) == (q.shape[2], k.shape[2]) and dropout == 0
    assert lse.is_contiguous() and lse.shape == q.shape[:3] and g.stride(-1) == out.stride(-1) == 1
    assert (seed.dtype, tuple(seed.shape), offset.dtype, tuple(offset.shape)) == (torch.uint64, (2,), torch.uint64, ())
    return gradients(g, q, k, v, out, lse, None, causal, scale)


def check_bias(bias: Tensor | None, q: Tensor, k: Tensor) -> None:
    if bias is not None:
        assert tuple(bias.shape) == (*q.shape[:3], k.shape[2]) and bias.dtype == q.dtype and bias.stride(-1) == 1
        assert all(stride % 4 == 0 for stride in bias.stride()[:-1])


def efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, with_lse: bool, dropout: float = 0.0, causal: bool = False, *,
    scale: Any = None,
) -> Any:  # fmt: skip
    assert q.shape[1] == k.shape[1] == v.shape[1] and dropout == 0 and with_lse
    check_bias(bias, q, k)
    out, lse = plain(q, k, v, bias, causal, scale)
    lse = F.pad(lse, (0, -lse.shape[2] % 32), value=float("inf"))
    return out, lse, torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)


def efficient_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, seed: Tensor, offset: Tensor,
    dropout: float, wanted: list[bool], causal: bool = False, *, scale: Any = None,
) -> Any:  # fmt: skip
    check_bias(bias, q, k)
    assert lse.shape[2] == -(-q.shape[2] // 32) * 32 and lse.is_contiguous() and bool(lse[:, :, q.shape[2] :].isinf().all())
    assert wanted == [True, True, True, False]
    return *gradients(g, q, k, v, out, lse[:, :, : q.shape[2]], bias, causal, scale), None


def cudnn(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, with_lse: bool, dropout: float = 0.0, causal: bool = False,
    debug: bool = False, *, scale: Any = None,
) -> Any:  # fmt: skip
    out, lse = plain(q, k, v, bias, causal, scale)
    state = torch.empty((), dtype=torch.int64)
    return out, lse.unsqueeze(-1), None, None, q.shape[2], k.shape[2], state, state.clone(), q.new_empty(0)


def cudnn_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seed: Any, offset: Any, bias: Tensor | None,
    ends_q: Any, ends_k: Any, rows: int, keys: int, dropout: float, causal: bool, *, scale: Any = None,
) -> Any:  # fmt: skip
    return gradients(g, q, k, v, out, lse.squeeze(-1), bias, causal, scale)


STAND_INS = {
    "_scaled_dot_product_cudnn_attention": cudnn,
    "_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
    "_scaled_dot_product_flash_attention": flash,
    "_scaled_dot_product_flash_attention_backward": flash_backward,
    "_scaled_dot_product_efficient_attention": efficient,
    "_scaled_dot_product_efficient_attention_backward": efficient_backward,
}


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(kernels.KERNELS, "cpu", kernels.KERNELS["cuda"])
    library = torch.library.Library("aten", "IMPL")
    for name, function in STAND_INS.items():
        library.impl(name, function, "CPU")
    yield
    library._destroy()


def as_flash(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> Tensor:
    assert bias is None
    out: Tensor = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False)[0]
    return out


def as_efficient(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> Tensor:
    """With its bias prepared as `scaled_dot_product_attention` does."""
    k, v = (item.repeat_interleave(q.shape[1] // item.shape[1], 1) for item in (k, v))
    if bias is not None:
        keys = k.shape[2]
        bias = F.pad(bias, (0, -keys % 16))[..., :keys].expand(*q.shape[:3], keys)
    out: Tensor = aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, causal)[0]
    return out


def as_cudnn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> Tensor:
    out: Tensor = aten._scaled_dot_product_cudnn_attention(q, k, v, bias, True, 0.0, causal, False)[0]
    return out


OPERATORS = {"flash": as_flash, "efficient": as_efficient, "cudnn": as_cudnn}


def self_attention(kernel: str, mask: Callable[[int], Tensor] | None, causal: bool, groups: int) -> Callable[..., Tensor]:
    """One tensor [B, T, (heads + 2 groups) D] to a number; eager computes what it should by the math of attention."""

    def function(x: Tensor) -> Tensor:
        length = x.shape[1]
        q, k, v = x.unflatten(-1, (-1, HEAD)).transpose(1, 2).split((4, groups, groups), 1)
        bias = None if mask is None else torch.zeros(length, length, dtype=x.dtype).masked_fill(~mask(length), float("-inf"))
        if torch.compiler.is_compiling() or _is_traced(x):
            out = OPERATORS[kernel](q, k, v, bias, causal)
        else:
            out = plain(q, k, v, bias, causal, None)[0]
        return (out * torch.linspace(0.5, 1.5, HEAD, dtype=x.dtype)).pow(2).sum()

    return function


def _is_traced(x: Tensor) -> bool:
    return isinstance(x, torch._subclasses.FakeTensor | torch._subclasses.functional_tensor.FunctionalTensor)


def triangle(length: int) -> Tensor:
    return torch.arange(length)[None] <= torch.arange(length)[:, None]


def window(length: int) -> Tensor:
    return triangle(length) & (torch.arange(length)[None] > torch.arange(length)[:, None] - 5)


@pytest.mark.parametrize("length", [19, 32])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize(
    ("kernel", "mask", "causal", "verdict"),
    [
        ("flash", None, True, "causal"),
        ("flash", None, False, "masked"),
        ("efficient", None, True, "causal"),
        ("efficient", triangle, False, "causal"),
        ("efficient", window, False, "window(5)"),
        ("efficient", None, False, "masked"),
        ("cudnn", None, True, "causal"),
    ],
)
@pytest.mark.parametrize("is_half", [True, False])
def test_kernels_stream(
    kernel: str, mask: Any, causal: bool, verdict: str, groups: int, length: int, is_half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_half:
        monkeypatch.setattr(kernels, "FLASH_TYPES", {torch.float64})
    torch.manual_seed(0)
    x = torch.randn(2, length, (4 + 2 * groups) * HEAD, dtype=torch.float64, requires_grad=True)
    function = self_attention(kernel, mask, causal, groups)
    compare_function(function, [x], (5, 1, length), streams=True, attention={verdict})


def test_dropout_is_left_to_its_kernel() -> None:
    def function(x: Tensor) -> Tensor:
        q, k, v = x.unflatten(-1, (3, HEAD)).unbind(2)
        q, k, v = (item[:, None] for item in (q, k, v))
        out: Tensor = aten._scaled_dot_product_flash_attention(q, k, v, 0.5, True, False)[0]
        return out.sum()

    with pytest.raises(AssertionError):  # the stand-in has no dropout: the original operator is what was called
        traced(function, [torch.randn(2, 9, 3 * HEAD, dtype=torch.float64, requires_grad=True)])


def test_a_bias_that_wants_a_gradient_is_left_to_its_kernel() -> None:
    def function(x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = (item[:, None] for item in x.unflatten(-1, (3, HEAD)).unbind(2))
        out: Tensor = aten._scaled_dot_product_efficient_attention(q, k, v, bias.expand(2, 1, 16, 16), True, 0.0, False)[0]
        return out.sum()

    x = torch.randn(2, 16, 3 * HEAD, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(16, 16, dtype=torch.float64, requires_grad=True)
    with pytest.raises(AssertionError):  # the stand-in has no gradient for it
        traced(function, [x, bias])
