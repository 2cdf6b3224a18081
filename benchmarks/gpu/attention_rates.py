"""How fast kernels compute the causal attention of a chunk: in one call, or one for its past and one for its own rows.

Rates count the pairs of rows and keys that are seen; the backward computes 2.5 times the forward's FLOPs, as in the literature.
The planner's rates of kernels are compared with these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.measures import Finding, distance, seconds
from benchmarks.gpu.place import Place
from streamfx.kernels import chunk_attention, sdpa
from streamfx.kernels.attention_call import AttentionCall

aten = torch.ops.aten
HEADS, GROUPS, WIDTH, CHUNKS = 32, 8, 128, (4096, 2048, 8192)  # Qwen3-8B's and Llama-3.1-8B's; rows of a chunk
SMALL_HEADS, SMALL_GROUPS, SMALL_WIDTH, SMALL_CHUNKS, SMALLER = 4, 2, 16, (16,), 128
CLOSE = 0.02  # of the norm: bfloat16 has two to three digits


class Kernel(NamedTuple):
    """(q, k, v, causal) -> out and more, of which the log-sum-exp [b h m] is first; (g, q, k, v, out, lse, more, causal)."""

    forward: Callable[..., tuple[Tensor, Any]]
    backward: Callable[..., Any]


class Way(NamedTuple):
    """Both passes of a chunk: (q, k, v) -> out and more, (g, q, k, v, out, more) -> gradients."""

    forward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Any]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Any], tuple[Tensor, ...]]


def rates(place: Place, keys: int) -> Iterator[Finding]:
    """Rates of all ways for chunks at the end of so many keys. A way whose numbers are apart from the first way's is off."""
    keys = keys // SMALLER if place.small else keys
    for rows in SMALL_CHUNKS if place.small else CHUNKS:
        given = _drawn(place, rows, keys)
        reference: list[Tensor] = []
        for name, way in ways(place).items():
            try:
                made, speeds = _measured(place, way, given)
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, NotImplementedError) as error:  # a build, or a card, without these kernels
                yield Finding(f"{rows} rows", {f"{name}: does not run": str(error).splitlines()[0][:120]})
                continue
            reference = reference or made
            apart = max(map(distance, made, reference))
            figures = {f"{name}: {what}": value for what, value in speeds.items()}
            yield Finding(f"{rows} rows", {**figures, **({f"{name}: apart": apart} if apart > CLOSE else {})}, apart > CLOSE)


def _drawn(place: Place, rows: int, keys: int) -> Sequence[Tensor]:
    """Queries, keys, values and the gradient of a chunk, as projections and buffers of keys lie in memory: rows first."""
    heads, groups, width = (SMALL_HEADS, SMALL_GROUPS, SMALL_WIDTH) if place.small else (HEADS, GROUPS, WIDTH)
    sizes = ((rows, heads), (keys, groups), (keys, groups), (rows, heads))
    return [place.random(1, *size, width, seed=seed).transpose(1, 2) for seed, size in enumerate(sizes)]


def _measured(place: Place, way: Way, given: Sequence[Tensor]) -> tuple[list[Tensor], dict[str, float]]:
    """The result and the gradients, and the rates of both passes."""
    query, key, value, gradient = given
    _, heads, rows, width = query.shape
    flops = 4 * heads * width * (rows * (key.shape[2] - rows) + rows * (rows + 1) // 2)
    out, more = way.forward(query, key, value)
    gradients = way.backward(gradient, query, key, value, out, more)
    forward = seconds(place, lambda: way.forward(query, key, value))
    backward = seconds(place, lambda: way.backward(gradient, query, key, value, out, more))
    speeds = {"forward TFLOP/s": flops / forward / 1e12, "backward TFLOP/s": 2.5 * flops / backward / 1e12}
    return [out, *gradients], speeds


def ways(place: Place) -> dict[str, Way]:
    """The device's kernels, and what streamfx's runtime makes of them."""
    ours = Way(_runtime_forward, _runtime_backward)
    if not place.has_cuda:
        return {"fused, two calls": two_calls(Kernel(_fused_forward, _fused_backward)), "streamfx": ours}
    flash = Kernel(_flash_forward, _flash_backward)
    return {
        "FA2, one call": one_call(flash),
        "FA2, two calls": two_calls(flash),
        "cuDNN, two calls": two_calls(Kernel(_cudnn_forward, _cudnn_backward)),
        "streamfx": ours,
    }


def one_call(kernel: Kernel) -> Way:
    """A kernel whose causal mask ends at the last row and key."""
    return Way(
        lambda q, k, v: kernel.forward(q, k, v, True),
        lambda g, q, k, v, out, more: kernel.backward(g, q, k, v, out, more[0], more, True),
    )


def two_calls(kernel: Kernel) -> Way:
    """The past without a mask and the chunk's own rows with a square one, merged by log-sum-exp as ring attention does."""

    def parts(q: Tensor, *keys: Tensor) -> Iterator[tuple[list[Tensor], bool]]:
        past = keys[0].shape[2] - q.shape[2]
        if past:
            yield [item[:, :, :past] for item in keys], False
        yield [item[:, :, past:] for item in keys], True

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Any]:
        made = [kernel.forward(q, *own, causal) for own, causal in parts(q, k, v)]
        (out, (lse, *_)), *others = made
        for own, (own_lse, *_) in others:
            share = torch.sigmoid(own_lse - lse).unsqueeze(-1)
            out, lse = torch.lerp(out.float(), own.float(), share).to(own.dtype), torch.logaddexp(lse, own_lse)
        return out, (lse, [more for _, more in made])

    def backward(g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, more: Any) -> tuple[Tensor, ...]:
        lse, kept = more
        made = [
            kernel.backward(g, q, *own, out, lse, seen, causal) for (own, causal), seen in zip(parts(q, k, v), kept, strict=True)
        ]
        dq, dk, dv = zip(*made, strict=True)
        return sum(dq[1:], start=dq[0]), torch.cat(dk, 2), torch.cat(dv, 2)

    return Way(forward, backward)


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Any]:
    out, lse, *_, state, unused, _ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False)
    return out, (lse, state, unused)


def _flash_backward(g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, more: Any, causal: bool) -> Any:
    ends = (None, None, q.shape[2], k.shape[2])
    return aten._scaled_dot_product_flash_attention_backward(g, q, k, v, out, lse, *ends, 0.0, causal, *more[1:])


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Any]:
    """Its log-sum-exp has a last dimension of 1 in some versions of torch."""
    out, lse, *_, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False)
    return out, (lse.reshape(q.shape[:3]), lse.shape, seed, offset)


def _cudnn_backward(g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, more: Any, causal: bool) -> Any:
    _, shape, *states = more
    ends, own = (None, None, q.shape[2], k.shape[2]), lse.reshape(shape)
    return aten._scaled_dot_product_cudnn_attention_backward(g, q, k, v, out, own, *states, None, *ends, 0.0, causal)


def _fused_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Any]:
    out, lse = sdpa.forward(AttentionCall(q, k, v, causal=causal))
    return out, (lse,)


def _fused_backward(g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, more: Any, causal: bool) -> Any:
    return sdpa.backward(AttentionCall(q, k, v, causal=causal), g, out, lse)


def _runtime_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Any]:
    return chunk_attention.forward(q, k, v, None, k.shape[2] - q.shape[2], (None, 0))


def _runtime_backward(g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Any) -> tuple[Tensor, ...]:
    return chunk_attention.backward(g, q, k, v, out, lse, None, k.shape[2] - q.shape[2], (None, 0))
