"""Check and write report paths before slow work begins; this module imports nothing heavy."""

from __future__ import annotations

import os
from pathlib import Path

from streamfx.argument_checks import require
from streamfx.errors import ReportError, describe_error


def checked_path(path: str | os.PathLike[str]) -> Path:
    """Return the path if a file can be written there; raise an error otherwise."""
    asked = f"cannot write a report to {path!r}"
    require(isinstance(path, (str, os.PathLike)), ReportError, asked, path, "give the path of a file")
    target = Path(path)
    try:
        if target.is_dir():
            raise ReportError(asked, found="a folder", do="give the path of a file in it")
        if not target.absolute().parent.is_dir():
            raise ReportError(asked, found=f"no folder {str(target.parent)!r}", do="create it, or give another path")
        if not os.access(target if target.exists() else target.absolute().parent, os.W_OK):
            raise ReportError(asked, found="a path without write permission", do="give another path")
    except ReportError:
        raise
    except (OSError, ValueError) as error:  # an invalid path: too long, or with a null byte
        raise ReportError(asked, found=describe_error(error), do="give another path") from None
    return target


def is_file(path: Path) -> bool:
    """Return whether a file exists; False if the path is invalid."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def is_there(path: Path) -> bool:
    """Return whether a file or folder exists; False if the path is invalid."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def written(path: str | os.PathLike[str], text: str) -> Path:
    """Write a text and return its path."""
    target = checked_path(path)
    try:
        target.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        asked = f"cannot write a report to {os.fspath(path)!r}"
        raise ReportError(asked, found=str(error), do="give another path") from None
    return target
