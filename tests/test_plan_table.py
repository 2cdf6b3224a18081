"""`streamfx plan MODEL --table`: the longest sequences by card and by way of training."""

import json
from pathlib import Path

import pytest

import streamfx
from streamfx.tools.cli import main
from streamfx.tools.planner.table import CARDS, LengthRow, LengthTable
from streamfx.tools.report.verdict import CHECKPOINTING, CHUNKED, IN_CHUNKS
from tests.test_plan import TINY

pytest.importorskip("transformers")


def test_a_table_is_one_screen_and_one_page(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    lengths = (0, 4096, 10_000, 65_536, 1 << 20, 3 << 20)
    rows = tuple(LengthRow("all parameters", way, lengths) for way in ("streamfx", CHECKPOINTING, CHUNKED))
    table = LengthTable("some <model>", "batch 1", rows)
    _, header, first, second, third, _ = str(table).splitlines()
    assert header.split()[1:3] == ["24", "GiB"]
    assert first.split() == ["all", "parameters", "streamfx", "-", "4K", "9K", "64K", "1,024K", "3,072K"]
    assert second.split()[:2] == ["gradient", "checkpointing"] and third.lstrip().startswith("... with the loss in chunks")
    assert table.summary()["rows"][2] == {"training": "all parameters", "way": CHUNKED, "lengths": list(lengths)}
    page = table.to_html(tmp_path / "table.html").read_text()
    assert "some &lt;model&gt;: longest sequences" in page and ">1,024K</td>" in page


def test_a_table_of_one_card_or_of_several_devices_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    for given in (["--memory", "24G"], ["--world", "2"], ["--frontier"]):
        assert main(["plan", str(tmp_path), "--table", *given]) == 1
        assert "a table has the longest sequences of one device" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.compiled
def test_a_table_has_the_lengths_that_searches_find(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    assert main(["plan", str(tmp_path), "--table", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) == 9
    searched = streamfx.plan(TINY, memory="40GiB", max_length=True, optimizer="adamw8bit", lora_rank=16)
    found = {row["way"]: row["lengths"][CARDS.index(40)] for row in rows if row["training"] == "LoRA, rank 16"}
    wanted = {
        "streamfx": searched.max_length,
        CHECKPOINTING: searched.lengths[CHECKPOINTING],
        CHUNKED: searched.lengths[IN_CHUNKS],
    }
    assert found == pytest.approx(wanted, rel=0.02)
