"""Promise one, under what training runs do around a model: freezing, tying, accumulating, autocast, hooks, checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support import decoders, hf, layouts
from tests.support.exactness import (
    TOLERANCE,
    Recorder,
    assert_small,
    check_streamed,
    compare,
    errors,
    gradient_errors,
    outcome,
    recorder,
)

LENGTH = 13


def batch(rows: int = 2, length: int = LENGTH, seed: int = 0) -> dict[str, Tensor]:
    ids = layouts.tokens(decoders.VOCABULARY, rows, length, seed)
    return {"ids": ids, "labels": ids}


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def compiled(model: nn.Module, **options: Any) -> tuple[Callable[..., Any], Recorder]:
    backend = recorder(**{"chunk_size": 5, "loss_chunk_size": 5, **options})
    return torch.compile(model, backend=backend), backend


def twins(make: Callable[[], nn.Module] = decoders.Plain) -> tuple[nn.Module, nn.Module]:
    model = decoders.made(make)
    return model, copy.deepcopy(model)


def same_gradients(own: nn.Module, eager: nn.Module, what: str = "", tolerance: float = TOLERANCE) -> None:
    assert_small(gradient_errors(gradients(own), gradients(eager)), tolerance, what)


# -- parameters


def test_frozen_parameters() -> None:
    model = decoders.made(decoders.Plain)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp" not in name and "embed" not in name)
    report = compare(model, batch(), attention={"causal"}, also=(1, 16))
    assert report.errors


def test_only_low_rank_adapters_are_trained() -> None:
    class Adapted(nn.Module):
        def __init__(self, inner: nn.Linear) -> None:
            super().__init__()
            self.inner = inner
            self.down, self.up = nn.Linear(inner.in_features, 2, bias=False), nn.Linear(2, inner.out_features, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + self.up(self.down(x)) * 0.5

    model = decoders.made(decoders.Plain).requires_grad_(False)
    for attend in model.attend:  # type: ignore[union-attr]
        attend.q, attend.v = Adapted(attend.q).double(), Adapted(attend.v).double()  # type: ignore[union-attr]
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 8
    compare(model, batch(), attention={"causal"}, also=(1, 16))


def test_tied_weights() -> None:
    class Tied(decoders.Plain):
        def __init__(self) -> None:
            super().__init__()
            self.head.weight = self.embed.weight

    compare(decoders.made(Tied), batch(), attention={"causal"}, also=(1, 16))


def test_a_layer_used_twice() -> None:
    class Shared(decoders.Plain):
        def __init__(self) -> None:
            super().__init__(2)
            self.attend[1], self.mlp[1] = self.attend[0], self.mlp[0]

    compare(decoders.made(Shared), batch(), attention={"causal"}, also=(1, 16))


def test_an_unused_parameter_keeps_no_gradient() -> None:
    class Spare(decoders.Plain):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Parameter(torch.ones(3))

    compare(decoders.made(Spare), batch(), attention={"causal"})


def test_requires_grad_toggled_between_steps() -> None:
    own, eager = twins()
    function, _ = compiled(own)
    for trained in (True, False, True):
        for model in (own, eager):
            model.zero_grad(set_to_none=True)
            model.mlp.requires_grad_(trained)  # type: ignore[operator,union-attr]
        function(**batch()).backward()
        eager(**batch()).backward()
        same_gradients(own, eager, f"trained: {trained}")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_gradients_of_inputs_embeds(attention: str) -> None:
    ids = layouts.tokens(hf.VOCABULARY, 2, LENGTH)
    embeds = torch.randn(2, LENGTH, hf.WIDTH, dtype=torch.float64, requires_grad=True)
    compare(hf.made("llama", attention), {"inputs_embeds": embeds, "labels": ids}, also=(1, 16), attention={"causal"})


# -- steps


def test_gradient_accumulation() -> None:
    own, eager = twins()
    function, backend = compiled(own)
    for seed in range(3):
        function(**batch(seed=seed)).backward()
        eager(**batch(seed=seed)).backward()
    same_gradients(own, eager)
    assert len(backend.compilations) == 1


def test_two_calls_before_one_backward() -> None:
    own, eager = twins()
    function, backend = compiled(own)
    (function(**batch(seed=1)) * function(**batch(seed=2))).backward()
    (eager(**batch(seed=1)) * eager(**batch(seed=2))).backward()
    same_gradients(own, eager)
    assert len(backend.compilations) == 1


def test_backwards_in_the_other_order() -> None:
    own, eager = twins()
    function, _ = compiled(own)
    for run, model in ((function, own), (eager, eager)):
        first, second = run(**batch(seed=1)), run(**batch(seed=2))
        (2 * second).backward()
        (3 * first).backward()
        assert model.embed.weight.grad is not None  # type: ignore[union-attr]
    same_gradients(own, eager)


def test_training_steps() -> None:
    """Parameters change in place between steps."""
    own, eager = twins()
    function, backend = compiled(own)
    for run, model in ((function, own), (eager, eager)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for seed in range(4):
            optimizer.zero_grad()
            run(**batch(seed=seed)).backward()
            optimizer.step()
    assert len(backend.compilations) == 1
    for (name, one), (_, other) in zip(own.named_parameters(), eager.named_parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Callable[[], Any]) -> None:
    own, eager = twins()
    function, backend = compiled(own)
    with mode():
        torch.testing.assert_close(function(**batch()), eager(**batch()), rtol=1e-12, atol=0)
    check_streamed(backend.facts, True, {"causal"})


def test_evaluation_between_training_steps() -> None:
    own, eager = twins()
    function, _ = compiled(own)
    function(**batch()).backward()
    own.eval()
    with torch.no_grad():
        evaluated = function(**batch(seed=4))
    own.train()
    function(**batch(seed=1)).backward()
    for seed in (0, 1):
        eager(**batch(seed=seed)).backward()
    same_gradients(own, eager)
    torch.testing.assert_close(evaluated, eager(**batch(seed=4)), rtol=1e-12, atol=0)


def test_retain_graph() -> None:
    own, eager = twins()
    function, _ = compiled(own)
    for run in (function, eager):
        loss = run(**batch())
        loss.backward(retain_graph=True)
        loss.backward()
    same_gradients(own, eager)


def test_backward_twice_is_refused() -> None:
    function, _ = compiled(decoders.made(decoders.Plain))
    loss = function(**batch())
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_double_backward_says_that_it_is_not_supported() -> None:
    model = decoders.made(decoders.Plain)
    function, _ = compiled(model)
    loss = function(**batch())
    (gradient,) = torch.autograd.grad(loss, [model.get_parameter("embed.weight")], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        gradient.pow(2).sum().backward()


def test_a_gradient_of_some_inputs_only() -> None:
    """torch.autograd.grad for one parameter."""
    own, eager = twins()
    function, _ = compiled(own)
    (actual,) = torch.autograd.grad(function(**batch()), [own.get_parameter("head.weight")])
    (truth,) = torch.autograd.grad(eager(**batch()), [eager.get_parameter("head.weight")])
    torch.testing.assert_close(actual, truth, rtol=1e-12, atol=1e-15)


# -- hooks


def test_parameter_hooks_fire_once() -> None:
    own, eager = twins()
    function, _ = compiled(own)
    fired: list[str] = []
    for name, parameter in own.named_parameters():
        parameter.register_hook(lambda gradient, name=name: fired.append(name))  # type: ignore[misc]
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: fired.append(f"{name} after"))  # type: ignore[misc]
    function(**batch()).backward()
    names = [name for name, _ in own.named_parameters()]
    assert sorted(fired) == sorted([*names, *(f"{name} after" for name in names)])
    eager(**batch()).backward()
    same_gradients(own, eager)


def test_a_hook_that_scales_a_gradient() -> None:
    own, eager = twins()
    function, _ = compiled(own)
    for model in (own, eager):
        model.get_parameter("head.weight").register_hook(lambda gradient: 2 * gradient)
    function(**batch()).backward()
    eager(**batch()).backward()
    same_gradients(own, eager)


def test_optimizer_in_the_backward_pass() -> None:
    """Each parameter is updated as soon as its gradient is there, in the middle of the backward pass."""

    def descend(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.data.add_(parameter.grad, alpha=-0.1)

    own, eager = twins()
    function, _ = compiled(own)
    for model in (own, eager):
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(descend)
    for _ in range(2):
        function(**batch()).backward()
        eager(**batch()).backward()
    for one, other in zip(own.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)


def test_saved_tensors_hooks() -> None:
    """Whatever packs and unpacks saved tensors sees all of ours, each once."""
    own, eager = twins()
    function, _ = compiled(own)
    packed: list[Tensor] = []
    unpacked: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor.clone()

    def unpack(tensor: Tensor) -> Tensor:
        unpacked.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = function(**batch())
    loss.backward()
    eager(**batch()).backward()
    same_gradients(own, eager)
    assert len(packed) == len(unpacked) > 0


def test_offload_of_saved_tensors() -> None:
    own, eager = twins()
    function, _ = compiled(own)
    with torch.autograd.graph.save_on_cpu():
        loss = function(**batch())
    loss.backward()
    eager(**batch()).backward()
    same_gradients(own, eager)


# -- checkpoints


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_in_the_model(reentrant: bool) -> None:
    class Checkpointed(decoders.Plain):
        def hidden(self, x: Tensor, **more: Any) -> Tensor:
            for i in range(2):
                x = checkpoint(self.layer, x, i, use_reentrant=reentrant)  # type: ignore[assignment]
            return self.norms[-1](x)

        def layer(self, x: Tensor, i: int) -> Tensor:
            x = x + self.attend[i](self.norms[2 * i](x))
            return x + self.mlp[i](self.norms[2 * i + 1](x))

    compare(decoders.made(Checkpointed), batch(), also=(1, 16), attention={"causal"})


def test_checkpointing_of_a_huggingface_model() -> None:
    model = hf.made("llama")
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    model.train()
    compare(model, layouts.plain(layouts.tokens(hf.VOCABULARY, 2, LENGTH)), also=(1, 16), attention={"causal"})


# -- precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [decoders.Plain, decoders.Triangle], ids=["fused", "spelled"])
def test_low_precision_is_as_near_to_the_truth_as_eager(make: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    low = decoders.made(make, dtype=dtype)
    truth_model = copy.deepcopy(low).double()
    truth = outcome(truth_model, truth_model, batch(2, 64))
    eager_model = copy.deepcopy(low)
    eager = outcome(eager_model, eager_model, batch(2, 64))
    # chunks no smaller than a vector register: torch's CPU kernels round `rsqrt` and others twice in what is left over
    function, backend = compiled(low, chunk_size=32, loss_chunk_size=32)
    own = outcome(function, low, batch(2, 64))
    check_streamed(backend.facts, True, {"causal"})
    assert distance(own.gradients, truth.gradients) <= 1.1 * distance(eager.gradients, truth.gradients)
    assert all(g is not None and g.dtype == dtype for g in own.gradients.values())


def distance(actual: dict[str, Tensor | None], truth: dict[str, Tensor | None]) -> float:
    """Norm of all differences over norm of all gradients."""
    pairs = [(actual[name], wanted) for name, wanted in truth.items() if wanted is not None]
    difference = sum(float((one.double() - other).square().sum()) for one, other in pairs if one is not None)
    total = sum(float(other.square().sum()) for _, other in pairs)
    return float((difference / total) ** 0.5)


def test_autocast() -> None:
    """Weights in float32, products in bfloat16."""
    model = decoders.made(decoders.Plain, dtype=torch.float32)
    truth_model = copy.deepcopy(model).double()
    truth = outcome(truth_model, truth_model, batch(2, 64))
    eager_model = copy.deepcopy(model)
    function, backend = compiled(model, chunk_size=16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        eager = outcome(eager_model, eager_model, batch(2, 64))
        own = outcome(function, model, batch(2, 64))
    check_streamed(backend.facts, True, {"causal"})
    assert distance(own.gradients, truth.gradients) <= 1.1 * distance(eager.gradients, truth.gradients)


# -- dynamic shapes


def test_other_lengths_do_not_recompile_each_time() -> None:
    own, eager = twins()
    function, backend = compiled(own)
    for length in (13, 9, 21, 6, 30, 5):
        own.zero_grad()
        eager.zero_grad()
        function(**batch(length=length)).backward()
        eager(**batch(length=length)).backward()
        same_gradients(own, eager, f"length {length}")
    assert len(backend.compilations) == 2  # one for the first length, one for all others
    check_streamed(backend.facts, True, {"causal"})


@pytest.mark.parametrize(
    "make", [decoders.Plain, decoders.Triangle, decoders.HalfRope, decoders.Window], ids=lambda m: m.__name__
)
def test_mark_dynamic(make: Callable[[], nn.Module]) -> None:
    own, eager = twins(make)
    function, backend = compiled(own)
    for length in (13, 9, 21):
        own.zero_grad()
        eager.zero_grad()
        inputs = batch(length=length)
        for tensor in inputs.values():
            torch._dynamo.mark_dynamic(tensor, 1)
        function(**inputs).backward()
        eager(**batch(length=length)).backward()
        same_gradients(own, eager, f"length {length}")
    assert len(backend.compilations) == 1
    check_streamed(backend.facts, True, None)


def test_batch_and_length_both_change() -> None:
    own, eager = twins()
    function, backend = compiled(own)
    for rows, length in ((2, 13), (3, 9), (5, 21), (4, 4), (6, 6)):
        own.zero_grad()
        eager.zero_grad()
        function(**batch(rows, length)).backward()
        eager(**batch(rows, length)).backward()
        same_gradients(own, eager, f"{rows} rows of {length}")
    check_streamed(backend.facts, True, {"causal"})


def test_dynamic_lengths_of_a_huggingface_model() -> None:
    own = hf.made("llama")
    eager = copy.deepcopy(own)
    function, backend = compiled(own)
    for length in (13, 9, 21, 7):
        inputs = layouts.plain(layouts.tokens(hf.VOCABULARY, 2, length))
        actual, truth = outcome(function, own, inputs), outcome(eager, eager, inputs)
        assert_small(errors(actual, truth), TOLERANCE, f"length {length}")
    assert len(backend.compilations) == 2
    check_streamed(backend.facts, True, {"causal"})


# -- randomness


class Dropped(decoders.Decoder):
    """Dropout on the residual branches."""

    attention = decoders.CausalHeads

    def hidden(self, x: Tensor, **more: Any) -> Tensor:
        for i, (attend, mlp) in enumerate(zip(self.attend, self.mlp, strict=True)):
            x = x + F.dropout(attend(self.norms[2 * i](x)), 0.3, self.training)
            x = x + F.dropout(mlp(self.norms[2 * i + 1](x)), 0.3, self.training)
        return self.norms[-1](x)


class FusedDropoutHeads(decoders.Heads):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.3 if self.training else 0.0, is_causal=True)


class SpelledDropoutHeads(decoders.SpelledHeads):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = self.mask(q @ k.transpose(-2, -1) / decoders.HEAD**0.5)
        return F.dropout(torch.softmax(scores, dim=-1), 0.3, self.training) @ v


class FusedDropout(decoders.Decoder):
    attention = FusedDropoutHeads


class SpelledDropout(decoders.Decoder):
    attention = SpelledDropoutHeads


RANDOM = {"residual": Dropped, "fused attention": FusedDropout, "spelled attention": SpelledDropout}


@pytest.mark.parametrize("name", RANDOM)
def test_dropout_repeats_under_a_seed(name: str) -> None:
    own = decoders.made(RANDOM[name])
    function, backend = compiled(own)

    def step(seed: int) -> tuple[Tensor, dict[str, Tensor | None]]:
        own.zero_grad(set_to_none=True)
        torch.manual_seed(seed)
        loss = function(**batch())
        loss.backward()
        return loss.detach(), gradients(own)

    first, second, other = step(1), step(1), step(2)
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(g, second[1][n]) for n, g in first[1].items())  # type: ignore[arg-type]
    assert not torch.equal(first[0], other[0])
    check_streamed(backend.facts, True, {"causal"})


@pytest.mark.parametrize("name", RANDOM)
def test_gradient_with_dropout_is_that_of_the_sample_drawn(name: str) -> None:
    """Finite differences of the compiled function itself, under one seed."""
    own = decoders.made(RANDOM[name])
    function, _ = compiled(own)

    def loss() -> Tensor:
        torch.manual_seed(3)
        return function(**batch())

    loss().backward()
    step = 1e-6
    for parameter in own.parameters():
        assert parameter.grad is not None
        direction = torch.randn_like(parameter) / parameter.numel() ** 0.5
        with torch.no_grad():
            parameter.add_(direction, alpha=step)
        above = loss().detach()
        with torch.no_grad():
            parameter.add_(direction, alpha=-2 * step)
        below = loss().detach()
        with torch.no_grad():
            parameter.add_(direction, alpha=step)
        wanted = float((parameter.grad * direction).sum())
        assert float(above - below) / (2 * step) == pytest.approx(wanted, rel=1e-5, abs=1e-8)


def test_dropout_drops_what_it_says() -> None:
    """A third of the elements are dropped, the others scaled; rows of different chunks are not dropped alike."""

    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x * 1.0, 0.3, True)

    x = torch.ones(2, 60, 64, dtype=torch.float64, requires_grad=True)
    function, _ = compiled(Noise(), chunk_size=6)
    out = function(x)
    out.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, out)  # the gradient of x is the mask, and x is one
    kept = (out != 0).double()
    assert out.unique().tolist() == [0.0, pytest.approx(1 / 0.7)]
    assert float(kept.mean()) == pytest.approx(0.7, abs=0.02)
    chunks = kept[0].view(10, 6, 64)
    assert all(not torch.equal(chunks[i], chunks[j]) for i in range(10) for j in range(i))


def test_dropout_in_evaluation_is_none() -> None:
    model = decoders.made(Dropped).eval()
    compare(model, batch(), attention={"causal"})


def test_dropout_of_a_huggingface_model() -> None:
    model = hf.made("gpt2", "eager", resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.2).train()
    inputs = layouts.plain(layouts.tokens(hf.VOCABULARY, 2, LENGTH))
    function, backend = compiled(model)
    torch.manual_seed(5)
    first = outcome(function, model, inputs)
    torch.manual_seed(5)
    second = outcome(function, model, inputs)
    assert max(errors(first, second).values()) == 0
    check_streamed(backend.facts, True, {"causal"})


# -- buffers and mutation


def test_a_buffer_that_is_updated() -> None:
    """A running statistic is written in the forward pass: exact, streamed or not."""

    class Counting(decoders.Plain):
        seen: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(decoders.WIDTH))

        def hidden(self, x: Tensor, **more: Any) -> Tensor:
            out = super().hidden(x, **more)
            self.seen.add_(out.detach().mean((0, 1)))
            return out

    own, eager = twins(Counting)
    function, _ = compiled(own)
    for seed in range(2):
        function(**batch(seed=seed)).backward()
        eager(**batch(seed=seed)).backward()
    same_gradients(own, eager)
    torch.testing.assert_close(own.seen, eager.seen, rtol=1e-12, atol=1e-14)


def test_a_mask_buffer_that_is_written_to_after_compiling() -> None:
    """The compiled graph relies on the mask that it found; a change must not be overlooked."""
    own, eager = twins(decoders.TrilBuffer)
    function, _ = compiled(own)
    for mask in (None, torch.ones(48, 48).tril(2), torch.ones(48, 48), torch.ones(48, 48).tril()):
        for model in (own, eager):
            model.zero_grad()
            for attend in model.attend:  # type: ignore[union-attr]
                if mask is not None:
                    attend.tril.copy_(mask)  # type: ignore[union-attr,operator]
        function(**batch()).backward()
        eager(**batch()).backward()
        same_gradients(own, eager)


def test_autograd_function() -> None:
    """A straight-through estimator: its own backward is the truth, not the derivative of its forward."""

    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return (4 * x).round() / 4

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return 3 * gradient

    class Quantised(decoders.Plain):
        def hidden(self, x: Tensor, **more: Any) -> Tensor:
            return super().hidden(Rounded.apply(x))

    compare(decoders.made(Quantised), batch(), also=(1, 16), attention={"causal"})


def test_detached_branch() -> None:
    class Detached(decoders.Plain):
        def hidden(self, x: Tensor, **more: Any) -> Tensor:
            return super().hidden(x) + super().hidden(x.detach() * 2)

    compare(decoders.made(lambda: Detached(1)), batch(), also=(1, 16), attention={"causal"})
