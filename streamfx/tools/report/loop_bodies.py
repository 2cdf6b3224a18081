"""Bodies of loops as Python that runs by itself: with its imports, and what it is to be given."""

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

FEW = 6  # near matches that an error names
PLAIN = {"inf": "from math import inf", "nan": "from math import nan", "NoneType": "NoneType = type(None)"}


def bodies_of(graphs: Sequence[Facts]) -> dict[str, fx.GraphModule]:
    """The bodies of all loops by name; where loops of several graphs have one name, the number of the graph stands behind it."""
    found: dict[str, fx.GraphModule] = {}
    for number, facts in enumerate(graphs):
        for loop in facts.program.loops if facts.program is not None else ():
            name = loop.spec.name
            found[f"{name}_of_graph_{number}" if name in found else name] = loop.spec.body
    return found


def bodies_with(module: str, graphs: Sequence[Facts]) -> dict[str, fx.GraphModule]:
    """Those of the stages that hold a module, by its path in the model.

    Raises `ReportError` where no operator comes from such a module, or what does runs whole.
    """
    stages = [(facts, stage) for facts in graphs if facts.program is not None for stage in facts.stages]
    held = [(facts, stage) for facts, stage in stages if any(_is_within(path, module) for path in _paths(stage))]
    if not held:
        raise _unknown(module, {path for _, stage in stages for path in _paths(stage)})
    wanted = {id(loop.spec.body) for facts, stage in held for loop in loops_of(stage, facts)}
    found = {name: body for name, body in bodies_of(graphs).items() if id(body) in wanted}
    if not found:
        names = ", ".join(stage.name for _, stage in held)
        raise ReportError(_asked(module), found=f"{names} has no loops: it runs whole", do="print(explanation) says why")
    return found


def _paths(stage: Stage) -> set[str]:
    return {path for node in (*stage.forward, *stage.backward) if (path := module_path(node))}


def _is_within(path: str, module: str) -> bool:
    return path == module or path.startswith(f"{module}.")


def _asked(module: str) -> str:
    return f"bodies of loops with the module {module!r} are asked for"


def _unknown(module: str, paths: set[str]) -> ReportError:
    """With the names that are near, else the first ones."""
    parts = {".".join(path.split(".")[:count]) for path in paths for count in range(1, path.count(".") + 2)}
    near = get_close_matches(module, sorted(parts), FEW) or sorted(parts)[:FEW]
    do = f"give the path of a module, for example {', '.join(map(repr, near))}" if near else "the model has no modules in loops"
    return ReportError(_asked(module), found="no operator that streams comes from it", do=do)


def python_of(bodies: Mapping[str, fx.GraphModule]) -> str:
    """A file of Python with one class for each body: its `forward` computes a chunk.

    What a body holds itself (constants, masks that are programs) is handed to its class by name.
    """
    codes = {name: body.graph.python_code("self", verbose=True) for name, body in bodies.items()}
    imports = dict.fromkeys(line for code in codes.values() for line in _imports(code.src, code.globals))
    classes = [_class(name, codes[name].src, _held(bodies[name])) for name in bodies]
    head = ["import torch", "", "import streamfx.frontend.backend  # its operators", *imports]
    return "\n".join([*head, *(f"\n\n{text}" for text in classes)]) + "\n"


def _imports(source: str, names: Mapping[str, Any]) -> Iterator[str]:
    """What makes the global names of a function be there."""
    for name, value in names.items():
        if name != "torch" and re.search(rf"(?<![\w.]){re.escape(name)}\b", source):
            yield _import(name, value)


def _import(name: str, value: Any) -> str:
    if value is NoneType or (isinstance(value, float) and not math.isfinite(value)):
        return PLAIN[name]
    if isinstance(value, ModuleType):
        return f"import {value.__name__} as {name}"
    module, path = getattr(value, "__module__", ""), getattr(value, "__qualname__", getattr(value, "__name__", ""))
    if module and path and _is_there(module, path, value):
        return f"from {module} import {path}" + ("" if path == name else f" as {name}")
    return f"# {name}: {type(value).__name__}, which no module holds by name: set it before you run this"


def _is_there(module: str, path: str, value: Any) -> bool:
    try:
        return getattr(importlib.import_module(module), path, None) is value
    except ImportError:
        return False


def _held(body: fx.GraphModule) -> list[str]:
    """Names of what a body reads of itself."""
    nodes = (node for node in body.graph.nodes if node.op in ("get_attr", "call_module"))
    return list(dict.fromkeys(str(node.target).split(".")[0] for node in nodes))


def _class(name: str, source: str, held: Sequence[str]) -> str:
    lines = [f"class {_identifier(name)}(torch.nn.Module):"]
    if held:
        given = [f"        self.{item} = {item}" for item in held]
        lines += [f"    def __init__(self, {', '.join(held)}):", "        super().__init__()", *given, ""]
    return "\n".join([*lines, *(f"    {line}" if line.strip() else "" for line in source.strip("\n").splitlines())])


def _identifier(name: str) -> str:
    return re.sub(r"\W", "_", name)
