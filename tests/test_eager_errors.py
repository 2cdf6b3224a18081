"""An operator that fails while it is traced raises the error of eager mode, and allocates nothing."""

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional as F

from streamfx.torch_private.dynamo import user_error_of
from streamfx.torch_private.eager_errors import TRACER_LOG, eager_error_of, without_tracer_log

IDS, ROWS = torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3)
LARGE = torch.zeros(()).expand(2**20, 2**10)
Function = Callable[..., Tensor]


def traced_error(function: Function, *tensors: Tensor, is_dynamic: bool = False) -> Exception:
    """Return the error of a function on fake tensors."""
    shape_env = ShapeEnv() if is_dynamic else None
    with FakeTensorMode(shape_env=shape_env) as mode, pytest.raises(Exception) as caught:  # noqa: PT011  (whatever it is)
        function(*(mode.from_tensor(tensor, static_shapes=not is_dynamic) for tensor in tensors))
    return caught.value


FAILING: dict[str, tuple[Function, tuple[Tensor, ...]]] = {
    "shapes": (torch.mul, (ROWS, ROWS[:, :2])),
    "dtype of ids": (lambda ids: F.embedding(ids, torch.zeros(9, 4)), (ROWS,)),
    "dtype of labels": (F.cross_entropy, (ROWS, ROWS[:, 0])),
    "widths": (torch.matmul, (ROWS, ROWS)),
    "a size of at most a gigabyte": (torch.mul, (LARGE[:, :256], LARGE[:, :255])),
}


@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("name", FAILING)
def test_the_error_is_eagers(name: str, is_dynamic: bool) -> None:
    function, tensors = FAILING[name]
    with pytest.raises(Exception) as wanted:  # noqa: PT011
        function(*tensors)
    found = eager_error_of(error := traced_error(function, *tensors, is_dynamic=is_dynamic))
    assert type(found) is wanted.type and str(found) == str(wanted.value)
    assert found is not None and found.__context__ is None and found.__traceback__ is error.__traceback__


@pytest.mark.compiled
def test_an_error_has_no_symbols() -> None:
    """Loss functions compare lengths before they call an operator."""
    logits, labels = torch.zeros(12, 5), torch.zeros(9, dtype=torch.long)
    with pytest.raises(ValueError) as wanted:  # noqa: PT011
        F.cross_entropy(logits, labels)
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError) as caught:
        torch.compile(F.cross_entropy, backend="eager", dynamic=True)(logits, labels)
    assert str(user_error_of(caught.value)) == str(wanted.value)


def fails_itself(rows: Tensor) -> Tensor:
    raise ValueError("rows")


OTHER: dict[str, tuple[Function, tuple[Tensor, ...]]] = {
    "no operator": (fails_itself, (ROWS,)),
    "writes in place": (lambda rows, other: rows.mul_(other), (ROWS, ROWS[:, :2])),
    "too large": (torch.mul, (LARGE, LARGE[:, :2])),
    "runs in eager": (torch.nonzero, (ROWS,)),
}


@pytest.mark.parametrize("name", OTHER)
def test_other_errors_stay(name: str) -> None:
    function, tensors = OTHER[name]
    assert eager_error_of(traced_error(function, *tensors)) is None


def test_a_shape_that_depends_on_data_is_unknown() -> None:
    environment = ShapeEnv()
    count = environment.create_unbacked_symint()
    with FakeTensorMode(shape_env=environment), pytest.raises(RuntimeError) as caught:
        F.embedding(torch.empty(count), torch.zeros(9, 4))
    assert eager_error_of(caught.value) is None


def test_the_tracer_logs_no_traceback(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger(TRACER_LOG)
    monkeypatch.setattr(logger, "handlers", [caplog.handler])  # whatever other tests have set
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "disabled", False)
    monkeypatch.setattr(logger, "level", logger.level)  # restored afterwards
    logger.setLevel(logging.ERROR)
    with without_tracer_log():
        traced_error(torch.mul, ROWS, ROWS[:, :2])
    assert not caplog.records
    traced_error(torch.mul, ROWS, ROWS[:, :2])
    assert len(caplog.records) == 1
