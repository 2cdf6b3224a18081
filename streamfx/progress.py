"""A status line for slow work (tracing, planning, compiling), erased when the work is done.

It shows only long activities, and only if standard error is a terminal and this is the first process on its machine.
There is one line per process. If `progress=True` and there is no terminal, each text is a separate line. A command without a
terminal (`periodic_lines`) writes a line every `INTERVAL` seconds, also if the text has not changed.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

ProgressOption = bool | Literal["auto"]
DELAY = 2.0  # seconds before the line appears
INTERVAL = 10.0  # seconds between two lines of a command without a terminal
ERASE = "\r\x1b[K"


class _Activity:
    """One activity, and when it started."""

    def __init__(self, text: str, since: float) -> None:
        self.text, self.since = text, since


class _StatusLine:
    """The status line and its activities: nested, the outermost first."""

    def __init__(self) -> None:
        """Start without activities; `_shown` is the text on the terminal."""
        self._lock = threading.RLock()
        self._activities: list[_Activity] = []
        self._timer: threading.Timer | None = None
        self._shown = ""
        self.is_periodic = False

    def begin(self, activity: _Activity) -> None:
        """Add an activity; the first one starts a timer that shows the line once `DELAY` is over."""
        with self._lock:
            self._activities.append(activity)
            if len(self._activities) == 1:
                remaining = DELAY - (time.monotonic() - activity.since)
                if self.writes_periodically:
                    self._start_timer(INTERVAL, self._write_periodically)
                else:
                    self._start_timer(max(remaining, 0.0), self.refresh)
            self.refresh()

    def _start_timer(self, seconds: float, function: Callable[[], None]) -> None:
        self._timer = threading.Timer(seconds, function)
        self._timer.daemon = True
        self._timer.start()

    @property
    def writes_periodically(self) -> bool:
        """Whether a command without a terminal runs."""
        return self.is_periodic and not _is_terminal()

    def _write_periodically(self) -> None:
        """Write the text and its duration as a line, now and every `INTERVAL` seconds until all activities are done."""
        with self._lock:
            if self._activities:
                seconds = time.monotonic() - self._activities[0].since
                _write_to_terminal(f"{self._text()} {seconds:.0f} s\n")
                self._start_timer(INTERVAL, self._write_periodically)

    def end(self, activity: _Activity) -> None:
        """Remove an activity; the last one erases the line."""
        with self._lock:
            self._activities = [other for other in self._activities if other is not activity]
            if self._activities:
                self.refresh()
                return
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._shown and _is_terminal():
                _write_to_terminal(ERASE)
            self._shown = ""

    def refresh(self) -> None:
        """Write the line with all current activities, if the first has taken `DELAY` seconds and the text has changed."""
        with self._lock:
            if not self._activities or self.writes_periodically or time.monotonic() - self._activities[0].since < DELAY:
                return
            if (text := self._text()) != self._shown:
                self._shown = text
                _write_to_terminal(f"{ERASE}{text}" if _is_terminal() else f"{text}\n")

    def _text(self) -> str:
        """Return the line with all current activities.

        An activity is omitted if the text of the one around it begins with the same words: "planning" inside of "planning". On a
        terminal, outer activities that do not fit onto one line are omitted, because only one line is erased.
        """
        texts = [activity.text for activity in self._activities]
        distinct_texts = [text for text, outer_text in zip(texts, ["", *texts], strict=False) if not outer_text.startswith(text)]
        width = shutil.get_terminal_size().columns - 1 if _is_terminal() else None
        while len(text := f"streamfx: {', '.join(distinct_texts)} ...") > (width or len(text)) and len(distinct_texts) > 1:
            distinct_texts = distinct_texts[1:]
        return text[:width]


_line = _StatusLine()


@contextmanager
def periodic_lines() -> Iterator[None]:
    """Context manager for a command: without a terminal, show activities as a line every `INTERVAL` seconds."""
    previous, _line.is_periodic = _line.is_periodic, True
    try:
        yield
    finally:
        _line.is_periodic = previous


@contextmanager
def show_activity(text: str, option: ProgressOption = "auto", since: float | None = None) -> Iterator[Callable[[str], None]]:
    """Show an activity while the block runs; calling the yielded function changes its text. Activities may nest.

    `option` is the option `progress`. `since` is the start time if it is earlier than now; `DELAY` counts from it.
    """
    if not is_shown(option):
        yield lambda text: None
        return
    activity = _Activity(text, time.monotonic() if since is None else since)

    def set_text(text: str) -> None:
        """Change the text of the activity."""
        activity.text = text
        _line.refresh()

    _line.begin(activity)
    try:
        yield set_text
    finally:
        _line.end(activity)


def is_shown(option: ProgressOption) -> bool:
    """Return whether the option `progress` shows a line here.

    True always; "auto" on a terminal or in a command, in the first local process.
    """
    is_seen = _is_terminal() or _line.is_periodic
    return option is True or (option == "auto" and is_seen and os.environ.get("LOCAL_RANK", "0") == "0")


class Tally:
    """Counts activities, and shows each with the expected number: "compiling 3 of 24"."""

    def __init__(self, activity_name: str, expected: int, option: ProgressOption) -> None:
        """Count activities called `activity_name`, of which `expected` are expected."""
        self.activity_name, self.expected, self.option = activity_name, expected, option
        self._done, self._since = 0, 0.0

    @contextmanager
    def next_activity(self) -> Iterator[None]:
        """Context manager: show the next activity while the block runs, with its number: "compiling 3 of 24".

        Beyond the expected number, it is shown as "for other lengths": a function is compiled again.
        """
        self._since = self._since or time.monotonic()
        self._done += 1
        position = f" {self._done} of {self.expected}" if self._done <= self.expected else " for other lengths"
        with show_activity(f"{self.activity_name}{position}", self.option, self._since):
            yield


def _is_terminal() -> bool:
    """Return whether standard error is a terminal."""
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # there is none, or it is closed
        return False


def _write_to_terminal(text: str) -> None:
    """Write a text to standard error at once; do nothing if there is none, or the terminal is gone."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):  # the terminal is gone: not a reason to fail
        pass
