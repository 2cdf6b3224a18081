"""Reading reports in HTML, and looking at them with a browser that nobody sees."""

from __future__ import annotations

import shutil
import struct
import subprocess
import zlib
from html.parser import HTMLParser
from pathlib import Path

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
VOID = {"meta", "br", "hr", "img", "input", "link"}
CLOSED = {"path", "rect", "line", "circle"}  # of SVG, written as <path .../>


class Read(HTMLParser):
    """A document's tags, which have to be closed in order, its attributes, text, scripts and styles, and its data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.scripts, self.data = "", ""
        self._is_data = False
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._is_data = ("type", "application/json") in attrs
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        if self._is_data and self.open[-1] == "script":
            self.data += data
        elif self.open and self.open[-1] in ("script", "style"):
            self.scripts += data
        else:
            self.text += data


def browser() -> str:
    """A Chromium, or the test is skipped."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser here: none of {', '.join(BROWSERS)}")
    return found


def in_browser(page: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """What a headless browser without a network says of a page."""
    quiet = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--host-resolver-rules=MAP * ~NOTFOUND"]
    logging = ["--enable-logging=stderr", "--v=0", f"--user-data-dir={page.parent / 'profile'}"]
    command = [browser(), *quiet, *logging, *more, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def picture_of(page: Path, width: int, height: int) -> Path:
    """A screenshot."""
    picture = page.with_suffix(f".{width}.png")
    done = in_browser(page, f"--window-size={width},{height}", f"--screenshot={picture}")
    assert picture.exists(), done.stderr[-2000:]
    assert "Uncaught" not in done.stderr, done.stderr[-2000:]
    return picture


def size_and_content(picture: Path) -> tuple[int, int, float]:
    """Width, height, and which share of a PNG's bytes is not as the dot beside it: almost none of an empty page."""
    data, content = picture.read_bytes(), b""
    place = 8
    while place < len(data):
        (length,), kind = struct.unpack(">I", data[place : place + 4]), data[place + 4 : place + 8]
        body = data[place + 8 : place + 8 + length]
        if kind == b"IHDR":
            width, height = struct.unpack(">II", body[:8])
        content += body if kind == b"IDAT" else b""
        place += 12 + length
    raw = zlib.decompress(content)
    return width, height, 1 - raw.count(0) / len(raw)
