"""What streamfx is at, on a line of the terminal that is gone once it is through: tracing, planning, compiling.

Only what takes long is told of, and only where somebody looks: standard error is a terminal, and this is the first process of
its machine. There is one line for the process. Where `progress=True` asks for it and there is no terminal, each text is a line.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

Asked = bool | Literal["auto"]
PATIENCE = 2.0  # seconds in which nobody wonders
WIDTH = 78  # of a text: a longer one would take two lines, and only one is erased
ERASE = "\r\x1b[K"


class _Activity:
    """One thing that is being done, since a moment."""

    def __init__(self, text: str, since: float) -> None:
        self.text, self.since = text, since


class _StatusLine:
    """The line, and what it tells of: things that are parts of one another, the outermost first."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._doing: list[_Activity] = []
        self._timer: threading.Timer | None = None
        self._told = ""

    def begin(self, doing: _Activity) -> None:
        with self._lock:
            self._doing.append(doing)
            if len(self._doing) == 1:
                left = PATIENCE - (time.monotonic() - doing.since)
                self._timer = threading.Timer(max(left, 0.0), self.tell)
                self._timer.daemon = True
                self._timer.start()
            self.tell()

    def end(self, doing: _Activity) -> None:
        with self._lock:
            self._doing = [other for other in self._doing if other is not doing]
            if self._doing:
                self.tell()
                return
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._told and _is_terminal():
                _write(ERASE)
            self._told = ""

    def tell(self) -> None:
        """Write what is being done, where that takes long and has changed."""
        with self._lock:
            texts = [doing.text for doing in self._doing]
            parts = [text for text, around in zip(texts, ["", *texts], strict=False) if not around.startswith(text)]
            text = f"streamfx: {', '.join(parts)} ..."[:WIDTH]
            if not self._doing or text == self._told or time.monotonic() - self._doing[0].since < PATIENCE:
                return
            self._told = text
            _write(f"{ERASE}{text}" if _is_terminal() else f"{text}\n")


_line = _StatusLine()


@contextmanager
def doing(text: str, asked: Asked = "auto", since: float | None = None) -> Iterator[Callable[[str], None]]:
    """Tells of what is done inside; what is given changes the text. Inside of another one it tells of a part of that.

    `asked` is the option `progress`. `since` is when it began, where that is earlier than now: patience is counted from there.
    """
    if not is_shown(asked):
        yield lambda text: None
        return
    own = _Activity(text, time.monotonic() if since is None else since)

    def now(text: str) -> None:
        own.text = text
        _line.tell()

    _line.begin(own)
    try:
        yield now
    finally:
        _line.end(own)


def is_shown(asked: Asked) -> bool:
    """Whether the option `progress` shows anything here."""
    return asked is True or (asked == "auto" and _is_terminal() and os.environ.get("LOCAL_RANK", "0") == "0")


class Tally:
    """Counts things of which a number is expected, one after another, and tells of each."""

    def __init__(self, what: str, expected: int, asked: Asked) -> None:
        self.what, self.expected, self.asked = what, expected, asked
        self._done, self._since = 0, 0.0

    @contextmanager
    def one(self) -> Iterator[None]:
        """The next of them is done inside."""
        self._since = self._since or time.monotonic()
        self._done += 1
        number = f" {self._done} of {self.expected}" if self._done <= self.expected else " for other lengths"
        with doing(f"{self.what}{number}", self.asked, self._since):
            yield


def _is_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # there is none, or it was closed
        return False


def _write(text: str) -> None:
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):  # nobody looks any more: that is no reason to fail
        pass
