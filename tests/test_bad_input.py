"""Input that cannot be: one error that says what to do, and a training run that goes on as if it had not been given."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import streamfx
from streamfx import IntegrationError, OptionError
from streamfx.integrations import enable
from tests.support.small import VOCABULARY, Causal, tokens
from tests.support.spread import spread

IDS = tokens(2, 12)
SHORT = IDS[:, :-3]
OPTIONS: dict[str, Any] = {"chunk_size": 5, "loss_chunk_size": 5}


class Trained:
    """A decoder and its optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Decoder().double()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def step(self, ids: Tensor, labels: Tensor) -> float:
        self.optimizer.zero_grad()
        loss: Tensor = self.model(ids, labels)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def state(self) -> list[Tensor]:
        """All that a step may change: weights, buffers, gradients, what the optimizer keeps, the generator."""
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        kept = [value for state in self.optimizer.state.values() for value in state.values()]
        values = [*self.model.state_dict().values(), *gradients, *kept, torch.get_rng_state()]
        return [value.detach().clone() for value in values]


class Decoder(nn.Module):
    """Fused attention, a hook, a buffer that is written to, and all that a forward can do wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.mode = Causal(), ""
        self.register_buffer("seen", torch.zeros(()))
        self.seen: Tensor
        self.inner.register_forward_hook(lambda module, args, output: output * 1)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        if self.mode:
            return self.bad(ids, labels)
        loss: Tensor = self.inner(ids, labels)
        self.seen += 1
        return loss

    def bad(self, ids: Tensor, labels: Tensor) -> Tensor:
        if self.mode == "error":
            raise KeyError("in forward")
        loss: Tensor = self.inner(ids, labels)
        if self.mode == "data" and loss > 0:
            loss = loss * 2
        if self.mode == "number":
            loss = loss * (1 + int(loss.detach().item()))
        if self.mode == "break":
            torch._dynamo.graph_break()
        if self.mode == "rows":
            loss = loss + self.inner.embed(ids[0, ids[0] > 3]).square().mean()
        if self.mode == "late" and loss > 0:
            raise KeyError("in forward")
        return loss * 3


def fails(trained: Trained, kind: str) -> None:
    """A call that fails, as it does in eager."""
    ids, labels = {
        "labels": (IDS, SHORT),
        "types": (IDS.float(), IDS),
        "words": (IDS + VOCABULARY, IDS),
        "classes": (IDS, IDS + VOCABULARY),
    }.get(kind, (IDS, IDS))
    trained.model.mode = kind if kind in ("error", "late") else ""
    plain = copy.deepcopy(trained.model)
    plain._compiled_call_impl = None
    with pytest.raises(Exception) as wanted:  # noqa: PT011  (whatever it is)
        plain(ids, labels)
    with pytest.raises(wanted.type) as found:
        trained.step(ids, labels)
    trained.model.mode = ""
    assert type(found.value) is wanted.type
    assert str(wanted.value).split("'")[0][:20] in str(found.value)


@pytest.mark.parametrize("ask", [streamfx.explain, streamfx.verify])
def test_a_class_is_refused_before_it_is_changed(ask: Callable[..., Any]) -> None:
    """torch.compile puts what it makes into a class for good: all objects of it would compute nothing from then on."""

    class Mine(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).square().mean()

    model, x = Mine(4, 4), torch.randn(2, 4)
    before, call = model(x), Mine.__call__
    with pytest.raises(streamfx.StreamFXError, match=r"a class \(Mine\), not an object of it"):
        ask(Mine, x)
    assert Mine.__call__ is call and torch.equal(model(x), before)


def test_a_model_without_data_runs_as_in_eager() -> None:
    """On the meta device PyTorch asks for no gradient of what an operator without a formula there makes."""
    model, ids = Causal().to("meta"), torch.zeros(2, 16, dtype=torch.int64, device="meta")
    loss = torch.compile(model, backend="streambp")(ids, ids)
    assert loss.is_meta and loss.shape == model(ids, ids).shape


@pytest.mark.skipif(torch.__version__ < "2.13", reason="Dynamo of 2.11 refuses such a call before it asks any backend")
@pytest.mark.parametrize("options", [{}, {"bodies": "eager", "chunk_size": 4}])
def test_ids_without_data_beside_a_model_with_data(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """Eager looks up rows that nobody has written. AOTAutograd cannot trace the gradient of the table."""
    model, ids = Causal(), torch.zeros(2, 16, dtype=torch.int64)
    compiled = torch.compile(model, backend="streambp", options=options)
    for call in (model, compiled):
        model.zero_grad()
        call(ids.to("meta"), ids).backward()
        assert all(weight.grad is not None and weight.grad.device == weight.device for weight in model.parameters())
    assert "some of its inputs are on the meta device and others are not" in caplog.text
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="meta"):
        torch.compile(model, backend="streambp", options={**options, "strict": True})(ids.to("meta"), ids)


def test_calls_that_fail_leave_no_mark() -> None:
    """Good steps with bad ones between them: the same as the good ones alone."""
    clean, disturbed = Trained(), Trained()
    torch.manual_seed(1)
    with enable(clean.model, **OPTIONS):
        wanted = [clean.step(IDS, IDS) for _ in range(4)]
        state = clean.state()
    torch._dynamo.reset()
    torch.manual_seed(1)
    with enable(disturbed.model, **OPTIONS):
        found = [disturbed.step(IDS, IDS)]
        for kinds in (("labels", "error"), ("types", "late"), ("words", "classes")):
            for kind in kinds:
                disturbed.optimizer.zero_grad()
                before = disturbed.state()
                fails(disturbed, kind)
                same = [torch.equal(a, b) for a, b in zip(before, disturbed.state(), strict=True)]
                assert all(same), (kind, same)
            found.append(disturbed.step(IDS, IDS))
    assert found == pytest.approx(wanted, rel=1e-12)
    for ours, theirs in zip(disturbed.state(), state, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-12)
    assert disturbed.model.training and len(disturbed.model.inner._forward_hooks) == 1


@pytest.mark.parametrize("mode", ["data", "number", "break", "rows"])
def test_models_that_do_not_trace_in_one_piece_are_exact(mode: str) -> None:
    trained = Trained()
    model = trained.model
    model.mode = mode
    plain = copy.deepcopy(model)
    with enable(model, **OPTIONS):
        for one in (model, plain):
            one(IDS, IDS).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-12, atol=1e-14)  # type: ignore[arg-type]


def test_checkpointing_and_its_hooks_are_put_back_after_an_error() -> None:
    trained = Trained()
    inner: Any = trained.model.inner
    inner.gradient_checkpointing = True

    def make_inputs_require_grads(module: nn.Module, args: Any, output: Tensor) -> None:
        raise AssertionError("switched off while it is compiled")

    inner.register_forward_hook(make_inputs_require_grads, prepend=True)
    hooks = list(inner._forward_hooks.items())
    with enable(trained.model, **OPTIONS):
        trained.model.mode = "late"
        with pytest.raises(KeyError):
            trained.model(IDS, IDS)
    assert inner.gradient_checkpointing is True
    assert list(inner._forward_hooks.items()) == hooks


def test_the_place_in_the_model_is_said() -> None:
    trained = Trained()
    with enable(trained.model, **OPTIONS), pytest.raises(ValueError, match="to match target batch_size") as error:
        trained.model(IDS, SHORT)
    assert error.value.__cause__ is None and error.value.__context__ is None
    assert any("small.py" in note for note in getattr(error.value, "__notes__", ["small.py"]))  # Python 3.11


# -- options


def test_refusals_of_the_backend_arrive_as_they_are() -> None:
    trained = Trained()
    before = trained.state()
    with enable(trained.model, memory_budget=100), pytest.raises(streamfx.OverBudgetError, match="less than any plan"):
        trained.step(IDS, IDS)
    with enable(trained.model, memory_budget=1 << 30, bodies="eager"):
        assert trained.step(IDS, IDS) > 0
    assert len(trained.state()) > len(before)


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"options": {"chunksize": 8}}, "did you mean 'chunk_size'"),
    ({"options": {"chunk_size": 0}}, "1 or more, or 'auto'"),
    ({"options": {"chunk_size": True}}, "1 or more, or 'auto'"),
    ({"options": {"save": ["inputs"]}}, "allowed: 'inputs', 'attention'"),
    ({"options": {"memory_budget": "lots"}}, "a text like '24GiB'"),
    ({"options": [8]}, "must be a dictionary"),
    ({"mode": "max-autotune"}, "has no mode 'max-autotune'"),
]


@pytest.mark.parametrize(("given", "said"), spread(BAD_OPTIONS, 2), ids=str)
def test_bad_options_of_torch_compile(given: dict[str, Any], said: str) -> None:
    model = Trained().model
    compiled = torch.compile(model, backend="streambp", **given)
    with pytest.raises(OptionError, match=said):
        compiled(IDS, IDS)
    assert float(model.seen) == 0
    assert torch.compile(model, backend="streambp", mode="default")(IDS, IDS) > 0


# -- enable


class Holder:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: None, "a NoneType without .model"),
    (lambda: Causal, r"a class \(Causal\), not an object of it"),
    (lambda: [Causal()], "a list without .model"),
    (lambda: Holder(model=None), "a Holder, whose .model is NoneType"),
    (lambda: torch.compile(Causal()), "compiled already"),
    (lambda: torch.jit.script(nn.Linear(2, 2)), "torch.jit"),
]


@pytest.mark.parametrize(("given", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_what_cannot_be_enabled(given: Callable[[], Any], said: str) -> None:
    with pytest.raises(IntegrationError, match=said):
        enable(given())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"chunksize": 8}, "did you mean 'chunk_size'"),
        ({"chunk_size": "8"}, "1 or more, or 'auto'"),
        ({"options": 8}, "must be a dictionary of options, or streamfx.Options"),
        ({"options": {"chunk_size": 8}, "chunk_size": 9}, "option 'chunk_size' twice"),
        ({"dynamic": "yes"}, "dynamic of .* cannot be 'yes'"),
    ],
    ids=str,
)
def test_bad_options_of_enable(given: dict[str, Any], said: str) -> None:
    model = Causal()
    with pytest.raises(OptionError, match=said):
        enable(model, **given)
    assert model._compiled_call_impl is None


def test_a_refused_trainer_is_not_half_enabled() -> None:
    trainer: Any = Holder(model=Causal(), ref_model=Causal())
    with enable(trainer.ref_model), pytest.raises(IntegrationError, match="ref_model in place, and it is compiled already"):
        enable(trainer)
    assert trainer.model._compiled_call_impl is None
    trainer.ref_model = torch.compile(trainer.ref_model)
    with pytest.raises(IntegrationError, match="compiled already"):
        enable(trainer)
    assert trainer.model._compiled_call_impl is None
