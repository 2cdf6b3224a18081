"""Name stages after the modules on their nodes, for reports and logs only."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from torch import fx

from streamfx.node_meta import FORWARD_MODULES, MODULES
from streamfx.passes.ops.traits import CONTRACTIONS
from streamfx.torch_private.lines import frame_of


def module_path(node: fx.Node) -> str:
    """Return the path of the module in which a node was traced, as `layers.0.mlp`; "" if unknown or outside modules."""
    stack = node.meta.get(MODULES) or node.meta.get(FORWARD_MODULES) or {}
    paths = [entry[0] for entry in stack.values()]
    return plain_path(paths[-1]) if paths else ""


def plain_path(path: str) -> str:
    """Strip Dynamo's accessors from a module's path: the caller's name, bound methods, closures.

    >>> plain_path("L['self'].layers[0].mlp"), plain_path("L['call'].__self__._modules['layers'].0")
    ('layers.0.mlp', 'layers.0')
    >>> plain_path("L['self'].__dict__['_modules']['base_model'].model.layers.0")
    'base_model.model.layers.0'
    >>> plain_path("L['call'].__closure__[0].cell_contents.__self__.head")
    'head'
    """
    path = re.sub(r"^[LG]\['\w+'\]\.?", "", path)
    path = re.sub(r"__dict__\['(_modules|_parameters)'\]", r"\1", path)
    path = re.sub(r"^(?:__\w+__(?:\[\d+\]\.cell_contents)?(?:\.|$))+", "", path)
    path = re.sub(r"(?:^|\.)_(?:modules|parameters)\['([^']+)'\]", r".\1", path)
    return re.sub(r"\['?([^']+?)'?\]", r".\1", path).strip(".")


def stage_names(stages: Sequence[Sequence[fx.Node]]) -> list[str]:
    """Return a unique name for each stage (given by its forward operators): `layers.0`, `layers.0 (2)`, `stage 2`, ...

    The last form is for stages without a module and a function name; stages are numbered from 0.
    """
    names: list[str] = []
    for stage_index, nodes in enumerate(stages):
        name = stage_name(nodes) or f"stage {stage_index}"
        duplicates = sum(other == name or other.startswith(f"{name} (") for other in names)
        names.append(f"{name} ({duplicates + 1})" if duplicates else name)
    return names


def stage_name(nodes: Sequence[fx.Node]) -> str:
    """Return the path of the deepest module that has two thirds of a stage's contractions (matmuls, attention).

    Of all its operators if it has no contraction. Of a part of a layer, such as its attention, the layer, if the stage has other
    contractions of it. If no module has two thirds: the most frequent function, or "".
    """
    work = [node for node in nodes if node.target in CONTRACTIONS] or nodes
    paths = [path.split(".") for node in work if (path := module_path(node))]
    name: list[str] = []  # the parts of the path so far
    while next_parts := Counter(path[len(name)] for path in paths if len(path) > len(name) and path[: len(name)] == name):
        part, count = next_parts.most_common(1)[0]
        if 3 * count < 2 * len(work):
            break
        name.append(part)
    return ".".join(_layer_of(name, paths)) or _function_name(work)


def _layer_of(name: list[str], paths: Sequence[list[str]]) -> list[str]:
    """Return the path of the numbered module (a layer) around a module, if it has at least two other operators of `paths`.

    >>> attention, mlp = ["h", "1", "attn"], ["h", "1", "mlp"]
    >>> _layer_of(attention, [*6 * [attention], *2 * [mlp]]), _layer_of(attention, [*6 * [attention], mlp])
    (['h', '1'], ['h', '1', 'attn'])
    """
    counts = [sum(path[:depth] == name[:depth] for path in paths) for depth in range(len(name) + 1)]
    layers = [depth + 1 for depth, part in enumerate(name[:-1]) if part.isdigit() and counts[depth + 1] >= counts[-1] + 2]
    return name[: layers[0]] if layers else name


def parts_of_stage(nodes: Sequence[fx.Node]) -> dict[fx.Node, str]:
    """Return the part of the layer, as `self_attn` or `mlp`, in which each node was traced: a path below the stage's module.

    Nodes outside this module are omitted.
    """
    module = stage_name(nodes)
    paths = {node: path.removeprefix(f"{module}.") for node in nodes if (path := module_path(node)).startswith(f"{module}.")}
    return {node: _first_module(path) for node, path in paths.items()}


def _first_module(path: str) -> str:
    """Return the first module of a path, including the numbers of the modules that contain it.

    >>> [_first_module(path) for path in ("mlp.up", "layer.1.wi", "0.mixer.conv", "experts.3")]
    ['mlp', 'layer.1.wi', '0.mixer', 'experts.3']
    """
    parts = path.split(".")
    pairs = zip(parts, [*parts[1:], ""], strict=True)
    end = next((i for i, (part, after) in enumerate(pairs, 1) if not part.isdigit() and not after.isdigit()), len(parts))
    return ".".join(parts[:end])


def _function_name(nodes: Sequence[fx.Node]) -> str:
    """Return the name of the user's function in which most of the nodes were traced; "" if none is known."""
    frames = filter(None, map(frame_of, nodes))
    functions = Counter(function for _file, _line, function, _code in frames if not function.startswith("<"))
    return functions.most_common(1)[0][0] if functions else ""
