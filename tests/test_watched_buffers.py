"""A buffer that holds a mask, or a few slopes, changes between two calls, in every way that torch has: the second is exact."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from streamfx.frontend import mask_buffers
from streamfx.ir.fingerprint import Fingerprint
from tests.support.decoders.parts import WIDTH as WIDE
from tests.support.decoders.parts import made
from tests.support.exactness import compare
from tests.support.spread import only
from tests.support.tables import named_cases
from tests.support.used import Used, batch, labelled

pytestmark = pytest.mark.compiled

WIDTH, LENGTH = 8, 21


class Model(nn.Module):
    """Attention three times: with a boolean mask, with an additive mask, and with slopes for distances."""

    visible: Tensor
    added: Tensor
    slopes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        self.register_buffer("visible", causal)
        self.register_buffer("added", torch.zeros(LENGTH, LENGTH).masked_fill(~causal, float("-inf")))
        self.register_buffer("slopes", torch.tensor([-0.5, -0.25]))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        index = torch.arange(x.shape[1])
        distance = (index[:, None] - index).clamp(min=0)
        scores = q @ k.mT
        hidden = index > index[:, None]
        shares = (
            scores.masked_fill(~self.visible, float("-inf")),
            scores + self.added,
            scores + (self.slopes[:, None, None] * distance).masked_fill(hidden, float("-inf")),
        )
        return x + sum((part.softmax(-1) @ v).transpose(1, 2).flatten(2) for part in shares)


OTHERS: dict[str, Tensor] = named_cases("others", globals())


def by_elements(buffer: Tensor, values: Tensor) -> None:
    """A single element, far above the diagonal."""
    buffer.data.view(-1)[-2 if buffer.dim() == 1 else LENGTH - 1] = values.view(-1)[-1]


CHANGES: dict[str, Callable[[Tensor, Tensor], object]] = named_cases("changes", globals(), "buffer, values")


def gradients(function: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    value = function(x)
    value.square().mean().backward()
    return [value.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", only(["data =", "one element", "set_"], CHANGES))
def test_a_call_after_a_buffer_changed_is_exact(name: str) -> None:
    model, x = Model().double(), torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    compiled = torch.compile(model, backend="streambp", options={"chunk_size": 5})
    gradients(compiled, model, x)
    for buffer, others in list(OTHERS.items())[: 1 if name == "swap_tensors" else None]:  # Dynamo holds the others by then
        before = model.get_buffer(buffer).clone()
        for change, values in ((CHANGES[name], others), (Tensor.copy_, before)):
            with torch.no_grad():
                change(model.get_buffer(buffer), values)
            for ours, theirs in zip(gradients(compiled, model, x), gradients(model, model, x), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12, equal_nan=True, msg=buffer)


def test_a_large_frozen_weight_is_identified_by_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """No version counter shows that `.data` is another tensor."""
    monkeypatch.setattr(mask_buffers, "MAX_BYTES_READ_PER_CALL", 0)
    weight = nn.Parameter(torch.ones(WIDTH, WIDTH + 1), requires_grad=False)
    watched = mask_buffers.watched_inputs([weight], [True])
    assert [item.fingerprint is not None and item.fingerprint.sums is None for item in watched] == [True]
    assert mask_buffers.have_same_patterns(watched, [weight])
    weight.data = torch.full_like(weight, 1e30)
    assert not mask_buffers.have_same_patterns(watched, [weight])


# -- fingerprints of tensors

TYPES = [torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
VIEWS: dict[str, Callable[[Tensor], Tensor]] = named_cases("views", globals(), "tensor")
REARRANGED: dict[str, Callable[[Tensor], Tensor]] = named_cases("rearranged rows", globals())


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_fingerprint_depends_on_every_element(dtype: torch.dtype, view: str) -> None:
    for shape in ((1, 1), (3, 5), (7, 1030), (140, 130)):
        tensor = VIEWS[view](torch.ones(shape, dtype=dtype))
        seen = Fingerprint.of(tensor)
        assert seen.change(tensor) is None
        for place in {0, tensor.numel() // 2, tensor.numel() - 1} if tensor.numel() else ():
            index = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), tensor.shape))
            tensor.data[index] = 0
            assert "past its version counter" in str(seen.change(tensor))
            tensor.data[index] = 1
        assert seen.change(tensor) is None


@pytest.mark.parametrize("name", REARRANGED)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_fingerprint_depends_on_order_and_signs(name: str, dtype: torch.dtype) -> None:
    """The same numbers in another order, or with other signs: sums that wrap would often be the same."""
    weight = torch.randn(512, 256, dtype=dtype)
    seen = Fingerprint.of(weight)
    weight.data.copy_(REARRANGED[name](weight))
    assert seen.change(weight) is not None


# -- a step that reads buffers and then writes to them


class Written(Used):
    """A decoder that reads and writes buffers and a weight that is not trained."""

    def __init__(self, step: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__(lambda own, x, labels: labelled(own, x + own.attend[0](own.norms[0](step(own, x))), labels))
        self.code, self.cache = (
            nn.Buffer(torch.randn(WIDE, WIDE)),
            nn.Buffer(torch.zeros(2, 2 * LENGTH, WIDE)),
        )
        self.count, self.norm = nn.Buffer(torch.zeros((), dtype=torch.int64)), nn.BatchNorm1d(WIDE)
        self.mean = nn.Parameter(torch.randn(WIDE, WIDE), requires_grad=False)


def averaged(own: Written, x: Tensor) -> Tensor:
    y = x @ own.code.clone()
    with torch.no_grad():
        own.code.mul_(0.9).add_((x.transpose(1, 2) @ x).mean(0), alpha=0.1)
    return y + x @ own.code


def cached(own: Written, x: Tensor) -> Tensor:
    seen = x * own.cache[:, :LENGTH].clone()
    own.cache[:, :LENGTH] = x.detach()
    return x + seen + (x @ own.cache.transpose(1, 2)) @ own.cache


def averaged_weight(own: Written, x: Tensor) -> Tensor:
    y = x @ own.mean.clone()
    with torch.no_grad():
        own.mean.lerp_(own.head.weight[:WIDE], 0.1)
    return y


def counted(own: Written, x: Tensor) -> Tensor:
    y = own.norm((x * (own.count + 1)).flatten(0, 1)).view_as(x)
    own.count.add_(1)
    return y


@pytest.mark.parametrize("step", [averaged, cached, averaged_weight, counted], ids=lambda step: step.__name__)
def test_the_backward_half_has_the_values_before_a_write(step: Callable[[Written, Tensor], Tensor]) -> None:
    compare(made(lambda: Written(step)), batch(LENGTH), chunk_size=8, streams=None)
