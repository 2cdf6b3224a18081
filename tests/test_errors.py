"""A caller gets each error as itself, with lines of user code only; a failed call changes nothing."""

import copy
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import streamfx
from streamfx import errors
from streamfx.integrations import enable
from streamfx.torch_private.dynamo import unwrap_errors
from tests.support.small import VOCABULARY, Causal, tokens
from tests.support.stretches import interpreted

pytestmark = pytest.mark.compiled

IDS = tokens(1, 12)
KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.StreamFXError)]


def refusing(error: Exception) -> Callable[..., Any]:
    def backend(module: fx.GraphModule, inputs: Any) -> Any:
        with unwrap_errors(module.graph):
            raise error

    return backend


@pytest.mark.parametrize("suppressed", [False, True])
def test_each_error_arrives_unchanged(suppressed: bool) -> None:
    """Dynamo neither wraps nor suppresses it."""
    for kind in KINDS:
        torch._dynamo.reset()
        error = kind("this was asked", found="that", do="something else")
        with torch._dynamo.config.patch(suppress_errors=suppressed), pytest.raises(kind) as found:
            torch.compile(lambda x: x * 2, backend=refusing(error))(torch.ones(2))
        assert found.value is error
        assert str(error) == "this was asked\n  found that\n  do    something else"
        assert error.__cause__ is None and error.__suppress_context__
        assert "x * 2" in getattr(error, "__notes__", ["x * 2"])[-1]  # Python 3.11
        assert not any("streamfx/" in file or "convert_frame" in file for file, _ in frames(error))


def frames(error: BaseException) -> list[tuple[str, str]]:
    return [(frame.filename, frame.name) for frame in traceback.extract_tb(error.__traceback__)]


def test_user_code_may_catch_an_error_after_a_graph_break() -> None:

    def outer(x: Tensor) -> Tensor:
        try:
            torch._dynamo.graph_break()
            return (lambda x: x * 2)(x)
        except streamfx.OverBudgetError as error:
            return x + error.smallest

    backend = refusing(streamfx.OverBudgetError("this was asked", found="that", do="something else"))
    assert torch.compile(outer, backend=backend)(torch.ones(2)).sum() == 2


REFUSED: list[tuple[dict[str, Any], type[Exception]]] = [
    ({"chunk_sise": 8}, streamfx.OptionError),
    ({"memory_budget": "1KiB"}, streamfx.OverBudgetError),
    ({"strict": True}, streamfx.NotStreamedError),
]


def test_a_failed_compilation_changes_nothing() -> None:
    class Cumulative(Causal):
        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            loss: Tensor = super().forward(ids, labels) + self.embed(ids).sort(1)[0].square().mean()
            return loss

    model = Cumulative().double()
    for options, kind in REFUSED * 2:
        with pytest.raises(kind) as found:
            torch.compile(model, backend="streambp", options=options)(IDS, IDS)
        assert type(found.value) is kind
        own = [name for file, name in frames(found.value) if "/torch/" not in file]
        assert own == ["test_a_failed_compilation_changes_nothing"]
    torch.compile(model, backend="streambp", options={"chunk_size": 5})(IDS, IDS).backward()
    with pytest.raises(streamfx.OptionError, match="reduce-overhead"):
        torch.compile(model, backend="streambp", mode="reduce-overhead")(IDS, IDS)


# -- errors of operators, at run time


def note_of(error: BaseException) -> str:
    (note,) = (note for note in getattr(error, "__notes__", ()) if "raised by" in note)
    return str(note)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have notes from Python 3.11 on")
@pytest.mark.parametrize("bodies", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_an_operators_error_names_its_line_of_the_model(bodies: str) -> None:
    """Inside of a loop, the message is eager's. A fallback's error has a note, too."""
    model, bad = Causal().double(), IDS.clone()
    bad[0, 7] = 99
    call = torch.compile(model, backend="streambp", options={"chunk_size": 5, "loss_chunk_size": 5, "bodies": bodies})
    for given, line in (((IDS, bad), "F.cross_entropy(self.head(x)"), ((bad, IDS), "x = self.embed(ids)")):
        with pytest.raises(IndexError) as wanted:
            model(*given)
        with interpreted():
            call(IDS, IDS).backward()
            with pytest.raises(IndexError) as found:
                call(*given).backward()
        assert str(found.value) == str(wanted.value)
        assert line in note_of(found.value) and "small.py" in note_of(found.value)
    table = torch.randn(5, requires_grad=True)
    look_up = torch.compile(lambda table, rows: table[rows].sort()[0].sum(), backend="streambp")
    look_up(table, torch.tensor([1, 2])).backward()
    with pytest.raises(IndexError) as found:
        look_up(table, torch.tensor([1, 9]))
    assert "aten.index.Tensor" in note_of(found.value) and "table[rows]" in note_of(found.value)


def test_the_log_has_a_summary_of_each_graph(caplog: pytest.LogCaptureFixture) -> None:
    """With `TORCH_LOGS="streamfx"`; a graph that runs unchunked has a reason."""
    for level in ("WARNING", "INFO"):
        assert not [record for record in caplog.records if record.name == "streamfx"]  # of the first level
        torch._dynamo.reset()
        with caplog.at_level(level, "streamfx"):
            torch.compile(Causal().double(), backend="streambp", options={"chunk_size": 5})(IDS, IDS)
            torch.compile(lambda x: x.sort()[0] * 2, backend="streambp")(torch.ones(3, requires_grad=True))
    streamed, first, whole, second = (record.getMessage() for record in caplog.records if record.name == "streamfx")
    assert "every stage streams, 5 to 12 rows per chunk" in first and "nothing streams" in second
    assert streamed.startswith("a graph of 12 rows: every stage streams") and "(predicted)" in streamed
    assert [row.split()[-7:-4] for row in streamed.splitlines() if "causal" in row] == [["causal", "5", "3"]]
    assert whole.startswith("a graph runs unchunked: no dimension of this graph can be streamed")


# -- wrong input: training continues as if the call had not happened

BATCH = tokens(2, 12)
OPTIONS: dict[str, Any] = {"chunk_size": 5, "loss_chunk_size": 5}


class Decoder(Causal):
    """Has a hook and a buffer that it writes to; may raise an error."""

    def __init__(self) -> None:
        super().__init__()
        self.mode = ""
        self.seen: Tensor = nn.Buffer(torch.zeros(()))
        self.register_forward_hook(lambda module, args, output: output * 1)
        self.gradient_checkpointing = True

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        if self.mode == "error":
            raise KeyError("in forward")
        loss = super().forward(ids, labels)
        if self.mode == "late" and loss > 0:
            raise KeyError("in forward")
        self.seen += not self.mode
        return loss


class Training:
    """A decoder and its optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Decoder().double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)

    def step(self, ids: Tensor, labels: Tensor) -> float:
        self.optimizer.zero_grad()
        loss: Tensor = self.model(ids, labels)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def state(self) -> list[Tensor]:
        """All that a step may change: weights, buffers, gradients, optimizer state, the generator."""
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        kept = [value for state in self.optimizer.state.values() for value in state.values()]
        values = [*self.model.state_dict().values(), *gradients, *kept, torch.get_rng_state()]
        return [value.detach().clone() for value in values]


BAD = {
    "labels": (BATCH, BATCH[:, :-3]),
    "types": (BATCH.float(), BATCH),
    "words": (BATCH + VOCABULARY, BATCH),
    "classes": (BATCH, BATCH + VOCABULARY),
}


def fails(trained: Training, kind: str) -> None:
    """Make a call that fails as in eager."""
    ids, labels = BAD.get(kind, (BATCH, BATCH))
    trained.model.mode = kind if kind not in BAD else ""
    plain = copy.deepcopy(trained.model)
    plain._compiled_call_impl = None
    with pytest.raises(Exception) as wanted:  # noqa: PT011  (whatever it is)
        plain(ids, labels)
    with pytest.raises(wanted.type) as found:
        trained.step(ids, labels)
    trained.model.mode = ""
    assert type(found.value) is wanted.type
    assert str(found.value) == str(wanted.value)
    if kind == "labels":
        assert found.value.__cause__ is None and found.value.__context__ is None
        assert any("small.py" in note for note in getattr(found.value, "__notes__", ["small.py"]))  # Python 3.11


def test_failed_calls_between_steps_change_nothing() -> None:
    eager, own = Training(), Training()
    wanted = [eager.step(BATCH, BATCH) for _ in range(4)]
    with enable(own.model, **OPTIONS):
        found = [own.step(BATCH, BATCH)]
        for kinds in (("labels", "error"), ("types", "late"), ("words", "classes")):
            for kind in kinds:
                own.optimizer.zero_grad()
                before = own.state()
                fails(own, kind)
                same = [torch.equal(a, b) for a, b in zip(before, own.state(), strict=True)]
                assert all(same), (kind, same)
            found.append(own.step(BATCH, BATCH))
    assert found == pytest.approx(wanted, rel=1e-12)
    for ours, theirs in zip(own.state(), eager.state(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-12)
    model = own.model
    assert model.training and len(model._forward_hooks) == 1 and model.gradient_checkpointing


@pytest.mark.skipif(torch.__version__ < "2.13", reason="Dynamo of 2.11 refuses such a call before it calls a backend")
def test_ids_on_the_meta_device_run_in_eager(caplog: pytest.LogCaptureFixture) -> None:
    """Eager looks up uninitialized rows; AOTAutograd cannot trace the gradient of the table."""
    model = Causal()
    compiled = torch.compile(model, backend="streambp", options={"bodies": "eager", "chunk_size": 4})
    for call in (model, compiled):
        model.zero_grad()
        call(BATCH.to("meta"), BATCH).backward()
        assert all(weight.grad is not None and weight.grad.device == weight.device for weight in model.parameters())
    assert "some of its inputs are on the meta device and others are not" in caplog.text
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="meta"):
        torch.compile(model, backend="streambp", options={"strict": True})(BATCH.to("meta"), BATCH)
