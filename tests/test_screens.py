"""Reports in a browser, from a phone's width to a desktop's, light and dark: nothing is cut, small, or over something else."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

import streamfx
from streamfx.tools.planner.table import STREAMFX, WAYS, LengthRow, LengthTable
from streamfx.tools.report.html import comparison_html_of, html_of
from tests.support.browser import CHROMIUM, laid_out, screenshot
from tests.support.layered import Layered
from tests.support.small import tokens
from tests.test_explain import TokenNorm, rows
from tests.test_plan import TINY

pytestmark = [pytest.mark.long, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]

WIDTHS = (360, 800, 1600)
CHUNKS = {"chunk_size": 32, "loss_chunk_size": 32}


def explained() -> str:
    return html_of(streamfx.explain(Layered(4), tokens(2, 640), options=CHUNKS).page)


def fallen_back() -> str:
    return html_of(streamfx.explain(TokenNorm(), rows(64), options={"chunk_size": 8}).page)


def planned() -> str:
    return html_of(streamfx.plan(TINY, seq=4096, frontier=True).page)


def compared() -> str:
    first, second = (streamfx.plan(TINY, seq=4096, keep_every=every) for every in (1, 3))
    return comparison_html_of(first.page, second.page)


def tabled() -> str:
    lengths = (0, 4096, 10_000, 65_536, 1 << 20, 3 << 20)
    ways = (STREAMFX, *WAYS.values())
    rows = (
        LengthRow(training, way, lengths) for training in ("all parameters", "LoRA, rank 16", "QLoRA, rank 16") for way in ways
    )
    with tempfile.TemporaryDirectory() as folder:
        return LengthTable("Qwen3-8B", "batch 1, no offload", tuple(rows)).to_html(Path(folder) / "table.html").read_text()


@pytest.fixture(scope="module", params=[explained, fallen_back, planned, compared, tabled], ids=lambda page: page.__name__)
def page(request: pytest.FixtureRequest) -> tuple[str, str]:
    make: Callable[[], str] = request.param
    return make.__name__, make()


@pytest.mark.parametrize("dark", [False, True])
def test_pages_fit_their_width(page: tuple[str, str], dark: bool, tmp_path: Path) -> None:
    """The screenshots stay in pytest's folder, for a person to look at."""
    name, text = page
    for width, layout in zip(WIDTHS, laid_out(text, WIDTHS, tmp_path, dark), strict=True):
        path = tmp_path / f"{name}-{width}-{'dark' if dark else 'light'}.png"
        screenshot(text, path, width, layout["height"], tmp_path, dark)
        assert layout["texts"] > 50
        assert layout["width"] == width
        assert [layout[fault] for fault in ("cut", "small", "overlaps")] == [[], [], []], json.dumps(layout, indent=1)
        assert layout["background"] == ("rgb(22, 23, 22)" if dark else "rgb(247, 247, 245)")


def test_a_cut_column_is_found(tmp_path: Path) -> None:
    wide = "<p style='width: 500px'>wide</p><div class='chart'><div class='plot' style='height: 9px'></div><span>on</span></div>"
    style = "<style>span { position: relative; top: -9px; font-size: 9px }</style>"
    (layout,) = laid_out(f"{style}{wide}", [360], tmp_path)
    assert layout["width"] > 360 and layout["cut"] and layout["small"]
    assert layout["overlaps"] == ["DIV.plot:  and SPAN.: on"]
