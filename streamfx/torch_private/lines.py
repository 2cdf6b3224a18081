"""The line of the user's code that an operator comes from, by what tracing left on its node. For people only."""

from __future__ import annotations

import re

from torch import fx

from streamfx.node_meta import STACK_TRACE

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)\n?\s*(.*)')
_LIBRARY = ("/torch/", "<string>", "<eval_with_key>")


def source_line(node: fx.Node) -> str:
    """`file:line, in function: code` of the user's code that a node comes from; empty where it is not known."""
    frame = frame_of(node)
    if frame is None:
        return ""
    file, line, function, code = frame
    return f"{file}:{line}, in {function}: {code.strip()}".rstrip(": ")


def frame_of(node: fx.Node) -> tuple[str, str, str, str] | None:
    """(file, line, function, code) of the user's own innermost frame."""
    frames = _FRAME.findall(node.meta.get(STACK_TRACE) or "")
    own = [frame for frame in frames if not any(part in frame[0] for part in _LIBRARY)] or frames
    return own[-1] if own else None
