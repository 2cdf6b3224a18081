"""The user's source line of an operator, from the trace metadata of its node. For messages only."""

from __future__ import annotations

import re

from torch import fx

from streamfx.node_meta import STACK_TRACE

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)\n?\s*(.*)')
_LIBRARY = ("/torch/", "<string>", "<eval_with_key>")


def source_line(node: fx.Node) -> str:
    """Return `file:line, in function: code` of the user's line from which a node was traced; "" if unknown."""
    frame = frame_of(node)
    if frame is None:
        return ""
    file, line, function, code = frame
    return f"{file}:{line}, in {function}: {code.strip()}".rstrip(": ")


def frame_of(node: fx.Node) -> tuple[str, str, str, str] | None:
    """Return (file, line, function, code) of the innermost frame of a node's stack trace that is in user code.

    If none is, of the innermost frame; None if the node has no stack trace.
    """
    frames = _FRAME.findall(node.meta.get(STACK_TRACE) or "")
    user_frames = [frame for frame in frames if not any(library in frame[0] for library in _LIBRARY)] or frames
    return user_frames[-1] if user_frames else None
