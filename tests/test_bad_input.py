"""Input that cannot be: one error that says what to do, and a training run that goes on as if it had not been given."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from streamfx.integrations import enable
from tests.support.small import VOCABULARY, Causal, tokens

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
        self.inner.gradient_checkpointing = True  # type: ignore[assignment]

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        if self.mode == "error":
            raise KeyError("in forward")
        loss: Tensor = self.inner(ids, labels)
        if not self.mode:
            self.seen += 1
            return loss
        if self.mode == "late" and loss > 0:
            raise KeyError("in forward")
        return loss


BAD = {"labels": (IDS, SHORT), "types": (IDS.float(), IDS), "words": (IDS + VOCABULARY, IDS), "classes": (IDS, IDS + VOCABULARY)}


def fails(trained: Trained, kind: str) -> None:
    """A call that fails, as it does in eager."""
    ids, labels = BAD.get(kind, (IDS, IDS))
    trained.model.mode = kind if kind not in BAD else ""
    plain = copy.deepcopy(trained.model)
    plain._compiled_call_impl = None
    with pytest.raises(Exception) as wanted:  # noqa: PT011  (whatever it is)
        plain(ids, labels)
    with pytest.raises(wanted.type) as found:
        trained.step(ids, labels)
    trained.model.mode = ""
    assert type(found.value) is wanted.type
    assert str(wanted.value).split("'")[0][:20] in str(found.value)
    if kind == "labels":
        assert found.value.__cause__ is None and found.value.__context__ is None
        assert any("small.py" in note for note in getattr(found.value, "__notes__", ["small.py"]))  # Python 3.11


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
    inner = disturbed.model.inner
    assert disturbed.model.training and len(inner._forward_hooks) == 1 and inner.gradient_checkpointing is True


@pytest.mark.skipif(torch.__version__ < "2.13", reason="Dynamo of 2.11 refuses such a call before it asks any backend")
def test_ids_without_data_beside_a_model_with_data(caplog: pytest.LogCaptureFixture) -> None:
    """Eager looks up rows that nobody has written. AOTAutograd cannot trace the gradient of the table."""
    model = Causal()
    compiled = torch.compile(model, backend="streambp", options={"bodies": "eager", "chunk_size": 4})
    for call in (model, compiled):
        model.zero_grad()
        call(IDS.to("meta"), IDS).backward()
        assert all(weight.grad is not None and weight.grad.device == weight.device for weight in model.parameters())
    assert "some of its inputs are on the meta device and others are not" in caplog.text
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="meta"):
        torch.compile(model, backend="streambp", options={"strict": True})(IDS.to("meta"), IDS)
