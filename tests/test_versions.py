"""A version of PyTorch that the tests never ran on is named once."""

from __future__ import annotations

import pytest
import torch

from streamfx.cli import main
from streamfx.report import no_gain
from streamfx.torch_private import versions


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests ran on no version from this one on."""
    monkeypatch.setattr(versions, "NEWEST", (2, 10))
    monkeypatch.setattr(versions, "OLDEST", (2, 9))
    monkeypatch.setattr(no_gain, "_told", set())


@pytest.mark.usefixtures("newer")
def test_the_first_compilation_names_an_untested_version(caplog: pytest.LogCaptureFixture) -> None:
    for rows in (8, 9):
        torch._dynamo.reset()
        torch.compile(torch.nn.Linear(4, 4), backend="streambp")(torch.zeros(1, rows, 4)).sum().backward()
    assert caplog.text.count(f"PyTorch {torch.__version__} is not tested") == 1


@pytest.mark.usefixtures("newer")
def test_doctor_names_an_untested_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("streamfx.cli.doctor.self_test", lambda: {"ok": True, "max_error": 0.0, "seconds": 0.0})
    assert main(["doctor"]) == 0
    assert f"PyTorch {torch.__version__} is not tested" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("version", "is_tested"),
    [("2.10.1", False), ("2.11.0", True), ("2.14.1+cu130", True), ("2.15.0", False), ("2.15.0a0+git1", False), ("3.0.0", False)],
)
def test_which_versions_are_untested(version: str, is_tested: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert (versions.untested() == "") is is_tested
