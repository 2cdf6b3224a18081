"""A version of PyTorch that the tests never ran on is named once, and the versions that ran stand in pyproject.toml and docs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from streamfx.cli import main
from streamfx.report import no_gain
from streamfx.torch_private import versions
from tests.versions import PAGE, ROOT, interpreter, known, page, record, table


def test_the_first_compilation_and_doctor_name_an_untested_version(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(versions, "NEWEST", (2, 10))
    monkeypatch.setattr(versions, "OLDEST", (2, 9))
    monkeypatch.setattr(no_gain, "_told", set())
    for rows in (8, 9):
        torch._dynamo.reset()
        torch.compile(torch.nn.Linear(4, 4), backend="streambp")(torch.zeros(1, rows, 4)).sum().backward()
    assert caplog.text.count(said := f"PyTorch {torch.__version__} is not tested") == 1
    monkeypatch.setattr("streamfx.cli.doctor.self_test", lambda: {"ok": True, "max_error": 0.0, "seconds": 0.0})
    assert main(["doctor"]) == 0
    assert said in capsys.readouterr().out


TESTED = {"2.10.1": False, "2.11.0": True, "2.14.1+cu130": True, "2.15.0": False, "2.15.0a0+git1": False, "3.0.0": False}


def test_which_versions_are_untested(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, is_tested in TESTED.items():
        monkeypatch.setattr(torch, "__version__", version)
        assert (versions.untested() == "") is is_tested


def test_the_page_is_written_from_the_rows() -> None:
    assert PAGE.read_text() == page(known()), "run python -m tests.versions --record"


def test_pyproject_allows_the_versions_that_ran() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest, (major, newest) = versions.OLDEST, versions.NEWEST
    assert f"torch>={oldest[0]}.{oldest[1]},<{major}.{newest + 1}" in project["dependencies"]
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    assert named and set(named) <= {".".join(row["python"].split(".")[:2]) for row in known() if not row["failed"]}


def test_a_row_takes_the_place_of_an_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.versions.FILE", tmp_path / "versions.jsonl")
    monkeypatch.setattr("tests.versions.PAGE", tmp_path / "versions.md")
    given = {"torch": "2.14.1+cu130", "transformers": "5.23.0", "skipped": 1, "files": "2 of 3", "date": "now", "commit": "abc"}
    record([{"python": "3.12.1", "passed": 9, "failed": ["tests.test_a::test_b"], **given}])
    record([{"python": "3.9.9", "passed": 7, "failed": [], **given}, {"python": "3.12.1", "passed": 10, "failed": [], **given}])
    text = (tmp_path / "versions.md").read_text()
    assert [row["passed"] for row in known()] == [7, 10] and "test_b" not in text
    assert text.endswith("\n".join(table(known())) + "\n")


def test_an_interpreter_is_found_by_path_or_version() -> None:
    assert interpreter(sys.executable) == sys.executable
    with pytest.raises(SystemExit, match="no python1\\.2 on the PATH"):
        interpreter("1.2")
