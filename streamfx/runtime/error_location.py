"""Add the line of the user's code to an error that an operator raises at run time inside one of our loops.

Loops run generated code, so a traceback shows no line of the model. Nodes of our graphs know the line that they were traced from.
"""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Iterator, Sequence
from itertools import chain

from torch import fx

from streamfx.torch_private.lines import source_line

_NOTE_PREFIX = "  raised by "
_ASSIGNED = re.compile(r"\s*(\w+)\b[^=]* = ")


def name_line(error: BaseException, running: Sequence[fx.Node]) -> None:
    """Add a note to an error that names the user's operator that was running, and its source line, unless a note exists.

    If the operator ran inside a graph (a loop body), the traceback identifies it; otherwise it is one of `running`, the nodes
    of the line of generated code that raised.
    """
    if not hasattr(error, "add_note") or any(note.startswith(_NOTE_PREFIX) for note in getattr(error, "__notes__", ())):
        return  # Python 3.10 has no notes
    in_graphs = list(_in_graphs(error))
    for nodes in (*reversed(in_graphs), running):
        lines = list(dict.fromkeys(filter(None, map(source_line, nodes))))
        if lines:
            error.add_note(f"{_NOTE_PREFIX}{_operator_name(nodes)}, which comes from {lines[0]}" + _last_line(lines))
            return


def _in_graphs(error: BaseException) -> Iterator[list[fx.Node]]:
    """Yield, for each graph module in the traceback, a list of the node that was running; from the outermost to the innermost.

    The traceback's line in the module's generated code, for example `mm = torch.ops...`, names the node. If this node has no
    source line, a neighbor that has one takes its place; [] if no operator has one.
    """
    for frame, line_number in traceback.walk_tb(error.__traceback__):
        module, file = frame.f_locals.get("self"), frame.f_code.co_filename
        if isinstance(module, fx.GraphModule) and file.startswith("<eval_with_key>"):
            assigned_name = _ASSIGNED.match(linecache.getline(file, line_number, frame.f_globals))
            nodes = list(module.graph.nodes)
            running_index = next(
                (i for i, node in enumerate(nodes) if assigned_name is not None and node.name == assigned_name[1]), len(nodes)
            )
            # inserted nodes have no source line, so use a neighbor
            with_line = (node for node in chain(nodes[running_index:], nodes[:running_index][::-1]) if source_line(node))
            yield [node] if (node := next(with_line, None)) is not None else []


def _operator_name(nodes: Sequence[fx.Node]) -> str:
    """Return the operator's name if only one can have been running, else "an operator"."""
    return str(nodes[0].target) if len(nodes) == 1 and nodes[0].op == "call_function" else "an operator"


def _last_line(lines: Sequence[str]) -> str:
    """Return the end of the note if several lines are possible."""
    return f", or one of the lines up to {lines[-1]}" if len(lines) > 1 else ""
