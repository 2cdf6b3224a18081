"""Names of stages, and the user's own source lines, from what tracing left on the nodes. For people only."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from torch import fx

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)\n?\s*(.*)')
_LIBRARY = ("/torch/", "<string>", "<eval_with_key>")


def module_path(node: fx.Node) -> str:
    """The module a node was traced in, as `layers.0.mlp`."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    paths = [entry[0] for entry in stack.values()]
    return _plain(paths[-1]) if paths else ""


def _plain(path: str) -> str:
    path = re.sub(r"^L\['self'\]\.?", "", path)
    path = re.sub(r"\._modules\['([^']+)'\]", r".\1", path)
    path = re.sub(r"\._parameters\['([^']+)'\]", r".\1", path)
    return re.sub(r"\['?([^']+?)'?\]", r".\1", path).strip(".")


def stage_name(nodes: Iterable[fx.Node], number: int) -> str:
    """The deepest module that most of the stage's operators share."""
    paths = [path.split(".") for node in nodes if (path := module_path(node))]
    if not paths:
        return f"stage {number}"
    name: list[str] = []
    while True:
        depth = len(name)
        longer = Counter(path[depth] for path in paths if len(path) > depth and path[:depth] == name)
        inside = sum(path[:depth] == name for path in paths)
        if not longer or longer.most_common(1)[0][1] * 2 <= inside:
            return ".".join(name) or f"stage {number}"
        name.append(longer.most_common(1)[0][0])


def source_line(node: fx.Node) -> str:
    """`file:line, in function: code` of the user's code that a node comes from; empty where it is not known."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [frame for frame in frames if not any(part in frame[0] for part in _LIBRARY)] or frames
    if not own:
        return ""
    file, line, function, code = own[-1]
    return f"{file}:{line}, in {function}: {code.strip()}".rstrip(": ")
