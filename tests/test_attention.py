"""Fused attention accepts operands with any memory layout, even if its kernels do not; attention with a sink is fused."""

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from streamfx.dialect.attention import ATTENTION
from streamfx.kernels import plain_attention, sdpa
from streamfx.kernels.attention_call import AttentionCall
from streamfx.kernels.device_kinds import DeviceKind, pretend_device
from tests.support.canonical import INF, NAN, Case, graphs, plain, targets
from tests.support.cuda_kernels import in_their_place
from tests.support.exactness import TOLERANCE, relative_error
from tests.support.tables import listed_cases, read
from tests.support.tracing import compare_function

aten = torch.ops.aten


def at_an_odd_address(x: Tensor) -> Tensor:
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def within(x: Tensor) -> Tensor:
    """A part of something larger, at odd places of it."""
    room = F.pad(x, (3, 2, 5, 1), value=float("nan"))
    return room[..., 5 : 5 + x.shape[-2], 3 : 3 + x.shape[-1]]


LAYOUTS: list[Callable[[Tensor], Tensor]] = listed_cases("layouts", globals())


class Drawn(NamedTuple):
    """Operands of an attention, in some layouts; the causal flag and the scale are drawn as well."""

    heads: tuple[Tensor, Tensor, Tensor]
    gradient: Tensor
    how: tuple[Tensor | None, bool, float | None]
    layouts: list[Callable[[Tensor], Tensor]]

    @property
    def call(self) -> AttentionCall:
        return AttentionCall(*self.heads, *self.how)

    def by_plain(self) -> list[Tensor]:
        out, lse = plain_attention.forward(self.call)
        return [out, lse, *plain_attention.backward(self.call, self.gradient, out, lse)]


def drawn(seed: int) -> Drawn:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def tensor(*shape: int) -> Tensor:
        return draw.choice(LAYOUTS)(torch.randn(*shape, dtype=torch.float64, generator=generator))

    b, m, n = draw.choice([1, 2]), draw.choice([1, 7, 32, 37]), draw.choice([1, 7, 16, 37])
    h, of_keys, of_values = draw.choice([(4, 4, 4), (4, 2, 2), (4, 1, 1), (1, 1, 1), (4, 2, 4)])
    d, e = draw.choice([(8, 8), (8, 8), (16, 8), (8, 16), (5, 5), (12, 20)])
    shapes = [(b, h, m, n), (b, 1, m, n), (1, 1, m, n), (b, h, 1, n), (1, 1, m, 1), (h, m, n), (m, n)]
    bias = tensor(*draw.choice(shapes)) if draw.random() < 0.5 else None
    heads = tensor(b, h, m, d), tensor(b, of_keys, n, d), tensor(b, of_values, n, e)
    how = bias, draw.random() < 0.5, draw.choice([None, None, 0.3, 0.0, -0.5])
    return Drawn(heads, tensor(b, h, m, e), how, [draw.choice(LAYOUTS[:-1]) for _ in range(2)])


def near(found: Sequence[Tensor], wanted: Sequence[Tensor], tolerance: float, seed: int) -> None:
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), found, wanted, strict=True):
        assert relative_error(a.double(), b.double(), floor=1.0) < tolerance, (seed, name, drawn(seed))


def check(seed: int) -> None:
    case = drawn(seed)
    wanted = case.by_plain()
    kept, kept_lse = case.layouts[0](wanted[0]), case.layouts[1](wanted[1][..., None])[..., 0]
    made = sdpa.backward(case.call, case.gradient, kept, kept_lse)
    near([*sdpa.forward(case.call), *made], wanted, TOLERANCE, seed)


@pytest.mark.parametrize("device", ["cpu", "half", "single"])
def test_attention_is_exact_for_any_memory_layout(device: str) -> None:
    with nullcontext() if device == "cpu" else in_their_place(half=device == "half"):
        for seed in range(150):
            check(seed)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.05), (torch.float16, 0.01), (torch.float32, 1e-5)])
def test_attention_is_as_exact_as_its_type_allows(dtype: torch.dtype, tolerance: float) -> None:
    """Log-sum-exps are float32; biases have the type of the queries."""
    with in_their_place(half=True):
        for seed in range(40):
            case = drawn(seed)
            q, k, v, gradient = (item.to(dtype) for item in (*case.heads, case.gradient))
            call = AttentionCall(q, k, v, *case.how)
            out, lse = sdpa.forward(call)
            found = sdpa.backward(call, gradient, out, lse)
            assert lse.dtype == torch.float32 and {item.dtype for item in (out, *found)} == {dtype}
            near([out, lse, *found], case.by_plain(), tolerance, seed)


def test_plain_attention_matches_autograd() -> None:
    for seed in range(20):
        case = drawn(seed)
        (bias, causal, scale), leaves = case.how, [item.detach().clone().requires_grad_() for item in case.heads]
        query, key, value = leaves
        key, value = (item.repeat_interleave(query.shape[1] // item.shape[1], 1) for item in (key, value))
        scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
        scores = scores if bias is None else scores + bias
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, float("-inf")) if causal else scores
        truth = scores.softmax(-1) @ value
        gradients = torch.autograd.grad(truth, leaves, case.gradient)
        near(case.by_plain(), [truth.detach(), scores.logsumexp(-1).detach(), *gradients], TOLERANCE, seed)


@pytest.mark.parametrize(("capability", "is_plain"), [((7, 5), True), ((8, 0), False)])
def test_types_without_a_kernel_run_plain_attention(capability: tuple[int, int], is_plain: bool) -> None:
    """Turing's kernels know float16 and float32 alone, and refuse; no kernel of CUDA knows float64."""
    types = torch.bfloat16, torch.float16, torch.float32, torch.float64
    with pretend_device(DeviceKind("cuda", capability, True)):
        chosen = [sdpa._kernels(torch.empty(1, dtype=dtype)) for dtype in types]
    assert [one is sdpa.PLAIN for one in chosen] == [is_plain, False, False, True]


def test_causal_flash_attention_over_more_keys_falls_back() -> None:
    """Its causal mask ends at the last row and key, where all others begin at the first."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        q, k, v = (item.unflatten(-1, (2, 8)).transpose(1, 2) for item in (x, y, y * y))
        out: Tensor = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False)[0]
        return out.pow(2).sum()

    inputs = [torch.randn(2, n, 16, dtype=torch.float64, requires_grad=True) for n in (9, 25)]
    with in_their_place(half=True):
        compare_function(function, inputs, (5,))


@pytest.mark.parametrize("scale", [-0.4, 0.0])
def test_a_causal_mask_with_a_negative_scale_is_exact(scale: float) -> None:
    """The kernel's causal flag masks before scaling, which gives NaN here; eager adds its mask after scaling."""

    def function(x: Tensor) -> Tensor:
        q, k, v = (item.unflatten(-1, (2, 8)).transpose(1, 2) for item in x.chunk(3, -1))
        mask = torch.arange(x.shape[1]) <= torch.arange(x.shape[1])[:, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).pow(2).sum()

    x = torch.randn(2, 17, 48, dtype=torch.float64, requires_grad=True)
    compare_function(function, [x], (5, 17), streams=True, attention={"causal"})


def test_a_row_that_sees_no_key_has_no_weights() -> None:
    q, k, v, gradient = torch.randn(4, 1, 2, 5, 4, dtype=torch.float64)
    bias = torch.zeros(1, 1, 5, 5, dtype=torch.float64).index_fill(2, torch.tensor(3), float("-inf"))
    out, lse = plain_attention.forward(AttentionCall(q, k, v, bias))
    made = plain_attention.backward(AttentionCall(q, k, v, bias), gradient, out, lse)
    assert all(item.isfinite().all() for item in (out, *made))
    assert not out[:, :, 3].any() and not made[0][:, :, 3].any()


# -- unfused attention with a sink becomes one fused kernel with the same values, also for extreme numbers

__all__ = ["INF"]  # a name in the table

LEAST = torch.finfo(torch.float64).min


def spelled(
    first: bool = False,
    scaled: Callable[[Tensor, float], Tensor] = torch.mul,
    back: Callable[[Tensor, float], Tensor] = torch.mul,
    dropped: Callable[[Tensor], Tensor] = lambda p: p,
    shown: bool = False,
    of_mask: bool = False,
    other: bool = False,
    bounded: Callable[[Tensor], Tensor] = lambda sink: sink.clamp(-1e20, 1e20),
    folded: bool = False,
    ahead: bool = False,
) -> Callable[..., list[Tensor]]:
    """The result and all gradients, as autograd writes them."""

    def function(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor, sink: Tensor, *mask: Tensor) -> list[Tensor]:
        b, h, m, d = q.shape
        n = k.shape[2]
        queries, keys = q.reshape(b * h, m, d), k.transpose(2, 3).reshape(b * h, d, n)
        values, result = v.reshape(b * h, n, -1), gradient.reshape(b * h, m, -1)
        s = scaled(aten.bmm(queries, keys).view(-1 if folded else b, 1 if folded else h, m, n), 0.5)
        s = (s + mask[0] if mask else s).view(b, h, m, n)
        column = bounded(sink)[:, :, None, None].expand(b, h, m, 1)
        both = torch.softmax(torch.cat([column, s] if first else [s, column], -1), -1)
        low, high = (1, n + 1) if first else (0, n)
        p = dropped(both[..., low:high]).reshape(b * h, m, n)
        of_p = aten.bmm(result, values.transpose(1, 2)).view(b, h, m, n)
        of_both = aten._softmax_backward_data(aten.slice_backward(of_p, [b, h, m, n + 1], 3, low, high, 1), both, -1, s.dtype)
        of_s = back(of_both[..., low:high], 0.5).reshape(b * h, m, n)
        early = [aten.bmm(p.transpose(1, 2), result)] if ahead else []
        made = [
            *early,
            aten.bmm(p, values).view(b, h, m, -1),
            aten.bmm(p.transpose(1, 2), result + 1 if other else result).view(b, h, n, -1),
            aten.bmm(of_s, keys.transpose(1, 2)).view(b, h, m, d),
            aten.bmm(of_s.transpose(1, 2), queries),
            aten.bmm(queries.transpose(1, 2), of_s).view(b, h, d, n),
            of_both[..., :1] if first else of_both[..., n:],
        ]
        return [*made, *([p] if shown else []), *([of_s.sum(0)] if of_mask else [])]

    return function


def spread(rows: int, keys: int) -> Callable[..., Tensor]:
    """The result of scores that a mask makes more of than their product has."""

    def function(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor, sink: Tensor, mask: Tensor) -> Tensor:
        b, h, m, d = q.shape
        queries, turned = q[:, :, :rows].reshape(b * h, rows, d), k[:, :, :keys].transpose(2, 3).reshape(b * h, d, keys)
        s = aten.bmm(queries, turned).view(b, h, rows, keys) + mask
        column = sink.clamp(-1.0, 1.0)[:, :, None, None].expand(b, h, m, 1)
        p = torch.softmax(torch.cat([s, column], -1), -1)[..., :-1]
        return aten.bmm(p.reshape(b * h, m, -1), v.reshape(b * h, -1, v.shape[3])).view(b, h, m, -1)

    return function


def inputs(sink: float = 0.3, mask: Tensor | None = None) -> tuple[Tensor, ...]:
    q, k, v, gradient = plain(2, 3, 5, 4), plain(2, 3, 7, 4) + 1, plain(2, 3, 7, 6) - 1, plain(2, 3, 5, 6)
    return q, k, v, gradient, torch.full((2, 3), sink, dtype=torch.float64), *(() if mask is None else (mask,))


def hidden(by: float) -> Tensor:
    """A mask under which a row sees nothing, and another two keys."""
    mask = torch.zeros(1, 1, 5, 7, dtype=torch.float64)
    mask[..., 2, :], mask[..., 1, 2:] = by, by
    return mask


TABLE = Path(__file__).parent / "support" / "attention_with_sink.txt"
CASES = {name: Case(eval(function), eval(given), changes=mark == "~") for name, mark, given, function in read(TABLE, 4)[""]}


@pytest.mark.parametrize("name", CASES)
def test_attention_with_a_sink_keeps_its_values(name: str) -> None:
    case = CASES[name]
    before, after = graphs(case)
    assert (ATTENTION in targets(after)) == case.changes
    for found, truth in zip(after(*case.inputs), before(*case.inputs), strict=True):
        torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-13, equal_nan=True)


def test_the_gradient_of_a_small_sink_keeps_its_digits() -> None:
    case = CASES["sink -40.0"]
    before, after = (module(*case.inputs)[-1] for module in graphs(case))
    torch.testing.assert_close(after, before, rtol=1e-11, atol=0)


def test_a_nan_query_yields_nan_in_its_row_only() -> None:
    """In its own row, as in eager: the kernel of a CPU makes zeros of it."""
    given = inputs()
    given[0][0, 0, 1, 0] = NAN
    before, after = (module(*given)[0].isnan() for module in graphs(Case(spelled(), given)))
    assert torch.equal(after, before)
