"""Public functions refuse wrong arguments with one kind of error, before they change anything."""

import runpy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace  # noqa: F401  (in tests/tables)
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import streamfx
from streamfx import (  # noqa: F401  (in tests/tables)
    IntegrationError,
    NotComparableError,
    NotTracedError,
    OptionError,
    Options,
    PlanError,
    ProfileError,
    ReportError,
    RuleError,
)
from tests.support.small import Causal, tokens
from tests.support.stateful.averages import averages  # noqa: F401  (in tests/tables)
from tests.support.tables import listed_cases, named_cases
from tests.test_plan import TINY

pytestmark = pytest.mark.compiled

IDS, ARRAY, MODULE = tokens(2, 12), np.zeros((2, 4), np.float32), nn.Linear(4, 4)
MM = torch.ops.aten.mm.default
ANY: Any = streamfx  # hides types from mypy
Refusal = tuple[type[Exception], str, Callable[[], Any]]


class Swallowing(Causal):
    def forward(self, ids: Tensor, labels: Tensor, **more: Any) -> Tensor:
        return super().forward(ids, labels)


def compiles(**given: Any) -> Any:
    return torch.compile(Causal(), backend="streambp", **given)(IDS, IDS)


TAKING_OPTIONS: dict[str, Callable[..., Any]] = {
    "enable": lambda *args, **given: ANY.enable(Causal(), *args, **given),
    "configure": ANY.configure,
    "plan": lambda *args, **given: ANY.plan("Qwen3-8B", *args, **given),
    "explain": lambda *args, **given: ANY.explain(Causal(), IDS, IDS, *args, **given),
    "verify": lambda *args, **given: ANY.verify(Causal(), IDS, IDS, *args, **given),
    "Options": ANY.Options,
}
TWICE = {"options": Options(chunk_size=4), "chunk_size": 5}
BY_NAME = r"takes options by name(?s:.*)options=.'chunk_size': 1024., or name each option"
ODD: list[Refusal] = listed_cases("options", globals())
OPTIONS: list[Refusal] = [
    *((OptionError, BY_NAME, partial(call, Options())) for call in TAKING_OPTIONS.values()),
    *((OptionError, BY_NAME, partial(TAKING_OPTIONS[name], {"save": 4})) for name in ("enable", "configure", "plan", "Options")),
    *((OptionError, "did you mean 'chunk_size'", partial(call, chunksize=4)) for call in TAKING_OPTIONS.values()),
    *((OptionError, "1 or more, or 'auto'", partial(call, chunk_size=0)) for call in TAKING_OPTIONS.values()),
    *((OptionError, rf"{name}\(.*'chunk_size' twice", partial(call, **TWICE)) for name, call in [*TAKING_OPTIONS.items()][:-1]),
    *ODD,
]
MODELS: list[Refusal] = listed_cases("models and calls", globals())


def of_one_length(b: int, t: int) -> dict[str, Tensor]:
    return {"x": torch.empty(2, 8, 4, device="meta")}


def of_one_batch(b: int, t: int) -> dict[str, Tensor]:
    return {"x": torch.empty(1, t, 4, device="meta")}


LINEAR = nn.Linear(4, 4, device="meta")
PLANS: dict[str, dict[str, Any]] = named_cases("plans", globals())
WRONG: list[Refusal] = [
    *OPTIONS,
    *MODELS,
    (PlanError, "missing a required argument: 'model'", ANY.plan),
    *((PlanError, message, partial(ANY.plan, **{"model": TINY, **given})) for message, given in PLANS.items()),
]


@pytest.mark.parametrize(("error", "message", "call"), WRONG)
def test_refusals(error: type[Exception], message: str, call: Callable[[], Any]) -> None:
    before = streamfx.options.resolve_options()
    with pytest.raises(error, match=message) as caught:
        call()
    assert isinstance(caught.value, streamfx.StreamFXError)
    assert "takes self" not in str(caught.value)
    assert streamfx.options.resolve_options() == before


@pytest.mark.parametrize("function", [streamfx.explain, streamfx.verify])
def test_a_class_is_refused_before_it_changes(function: Callable[..., Any]) -> None:
    """torch.compile changes a class for good: no later object of it would compute anything."""

    class Own(nn.Linear):
        pass

    call = Own.__call__
    with pytest.raises(streamfx.StreamFXError, match=r"a class \(Own\), not an instance"):
        function(Own, torch.randn(2, 4))
    assert Own.__call__ is call


def test_keywords_of_the_model_go_to_the_model() -> None:
    """Also a keyword that is the name of an option."""

    class Saves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Causal().double()

        def forward(self, ids: Tensor, save: float = 1.0) -> Tensor:
            return save * self.inner(ids, ids)

    assert streamfx.explain(Swallowing(), IDS, IDS, use_cache=False, position_ids=IDS).summary()["graphs"] == 1
    found = streamfx.verify(model := Saves(), IDS, save=2.0, chunk_size=6)
    assert found.ok and found.loss == pytest.approx(2 * model(IDS).item())


def test_a_bad_environment_is_refused_when_the_backend_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(streamfx.options.ENVIRONMENT, '{"chunk": 3}')
    asks = lambda: runpy.run_path(str(streamfx.frontend.backend.__file__)), streamfx.configure, lambda: streamfx.enable(Causal())
    for ask in asks:  # torch.compile does the first with the name of a backend
        with pytest.raises(OptionError, match="the environment variable STREAMFX_OPTIONS has no option 'chunk'"):
            ask()
