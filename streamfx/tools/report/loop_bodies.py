"""Print loop bodies as self-contained Python: with imports, and with the constants that each body needs as arguments."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from types import ModuleType, NoneType
from typing import Any

from torch import fx

from streamfx.errors import ReportError
from streamfx.ir.facts import Facts
from streamfx.ir.stage import Stage
from streamfx.passes.partition.stage_names import module_path
from streamfx.tools.report.stage_table import loops_of

MAX_MATCHES = 6  # similar module paths that an error names
NAME_IMPORTS = {"inf": "from math import inf", "nan": "from math import nan", "NoneType": "NoneType = type(None)"}


def bodies_of(graphs: Sequence[Facts]) -> dict[str, fx.GraphModule]:
    """Return all loop bodies by name. If loops of several graphs share a name, the graph's index is appended to it."""
    bodies: dict[str, fx.GraphModule] = {}
    for graph_index, facts in enumerate(graphs):
        for loop in facts.program.loops if facts.program is not None else ():
            name = loop.spec.name
            bodies[f"{name}_of_graph_{graph_index}" if name in bodies else name] = loop.spec.body
    return bodies


def bodies_of_module(module: str, graphs: Sequence[Facts]) -> dict[str, fx.GraphModule]:
    """Return the bodies of the stages that contain a module, given by its path in the model.

    Raises `ReportError` if no operator comes from this module, or if its stages fall back to the full sequence.
    """
    stages = [(facts, stage) for facts in graphs if facts.program is not None for stage in facts.stages]
    matching = [
        (facts, stage) for facts, stage in stages if any(f"{path}.".startswith(f"{module}.") for path in _module_paths(stage))
    ]
    asked = f"cannot find loop bodies of the module {module!r}"
    if not matching:
        do = _similar_modules_text(module, {path for _, stage in stages for path in _module_paths(stage)})
        raise ReportError(asked, found="none of its operators streams", do=do)
    body_ids = {id(loop.spec.body) for facts, stage in matching for loop in loops_of(stage, facts)}
    bodies = {name: body for name, body in bodies_of(graphs).items() if id(body) in body_ids}
    if not bodies:
        found = f"{', '.join(stage.name for _, stage in matching)} has no loops: it runs unchunked"
        raise ReportError(asked, found=found, do="print(explanation) shows the reason")
    return bodies


def _module_paths(stage: Stage) -> set[str]:
    """Return the module paths of the operators of a stage."""
    return {path for node in (*stage.forward, *stage.backward) if (path := module_path(node))}


def _similar_modules_text(module: str, paths: set[str]) -> str:
    """Return advice to give one of the module paths in loops that are similar to `module`, or else one of the first."""
    known_paths = {".".join(path.split(".")[:count]) for path in paths for count in range(1, path.count(".") + 2)}
    similar = get_close_matches(module, sorted(known_paths), MAX_MATCHES) or sorted(known_paths)[:MAX_MATCHES]
    examples = ", ".join(map(repr, similar))
    return f"give the path of a module, for example {examples}" if similar else "the model has no modules in loops"


def python_of(bodies: Mapping[str, fx.GraphModule]) -> str:
    """Return a Python file with one class per body, whose `forward` computes a chunk.

    Attributes of a body (constants, mask programs) are passed to its class by name.
    """
    codes = {name: body.graph.python_code("self", verbose=True) for name, body in bodies.items()}
    imports = dict.fromkeys(line for code in codes.values() for line in _imports(code.src, code.globals))
    classes = [_class_text(name, codes[name].src, bodies[name]) for name in bodies]
    head = ["import torch", "", "import streamfx.frontend.backend  # its operators", *imports]
    return "\n".join([*head, *(f"\n\n{text}" for text in classes)]) + "\n"


def _imports(source: str, names: Mapping[str, Any]) -> Iterator[str]:
    """Yield the import lines for the global names that a function uses."""
    for name, value in names.items():
        if name != "torch" and re.search(rf"(?<![\w.]){re.escape(name)}\b", source):
            yield _import_line(name, value)


def _import_line(name: str, value: Any) -> str:
    """Return the line that imports or defines a global name of generated code."""
    if value is NoneType or (isinstance(value, float) and not math.isfinite(value)):
        return NAME_IMPORTS[name]
    if isinstance(value, ModuleType):
        return f"import {value.__name__} as {name}"
    module, path = getattr(value, "__module__", ""), getattr(value, "__qualname__", getattr(value, "__name__", ""))
    if module and path and _is_importable(module, path, value):
        return f"from {module} import {path}" + ("" if path == name else f" as {name}")
    return f"# {name}: {type(value).__name__}, which no module holds by name: set it before you run this"


def _is_importable(module: str, path: str, value: Any) -> bool:
    """Return whether importing `path` from the module returns this very value."""
    try:
        return getattr(importlib.import_module(module), path, None) is value
    except ImportError:
        return False


def _class_text(name: str, source: str, body: fx.GraphModule) -> str:
    """Return a module class whose `forward` is the source of a loop body, and whose arguments are the attributes it reads."""
    identifier = re.sub(r"\W", "_", name)
    lines = [f"class {identifier}(torch.nn.Module):"]
    nodes = (node for node in body.graph.nodes if node.op in ("get_attr", "call_module"))
    if attributes := list(dict.fromkeys(str(node.target).split(".")[0] for node in nodes)):
        assignments = [f"        self.{attribute} = {attribute}" for attribute in attributes]
        lines += [f"    def __init__(self, {', '.join(attributes)}):", "        super().__init__()", *assignments, ""]
    return "\n".join([*lines, *(f"    {line}" if line.strip() else "" for line in source.strip("\n").splitlines())])
