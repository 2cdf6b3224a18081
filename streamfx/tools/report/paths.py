"""Where a report is written to: looked at before anything slow begins, so nothing heavy is imported here."""

from __future__ import annotations

import os
from pathlib import Path

from streamfx.argument_checks import refuse_unless
from streamfx.errors import ReportError, told


def checked_path(path: str | os.PathLike[str]) -> Path:
    """The path, if a file can be written there."""
    asked = f"a report is to be written to {path!r}"
    refuse_unless(isinstance(path, (str, os.PathLike)), ReportError, asked, path, "give the path of a file")
    found = Path(path)
    try:
        if found.is_dir():
            raise ReportError(asked, found="a folder", do="give the path of a file in it")
        if not found.absolute().parent.is_dir():
            raise ReportError(asked, found=f"no folder {str(found.parent)!r}", do="make it, or give another path")
        if not os.access(found if found.exists() else found.absolute().parent, os.W_OK):
            raise ReportError(asked, found="a place that must not be written to", do="give another path")
    except ReportError:
        raise
    except (OSError, ValueError) as error:  # no such path can be: it is too long, or holds a zero
        raise ReportError(asked, found=told(error), do="give another path") from None
    return found


def is_file(path: Path) -> bool:
    """Whether a file is there; where no such path can be, there is none."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def is_there(path: Path) -> bool:
    """The same of a file or a folder."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def written(path: str | os.PathLike[str], text: str) -> Path:
    """The path, at which the text is now."""
    found = checked_path(path)
    try:
        found.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        asked = f"a report is to be written to {os.fspath(path)!r}"
        raise ReportError(asked, found=str(error), do="give another path") from None
    return found
