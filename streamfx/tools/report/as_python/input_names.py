"""Names of a graph's inputs, from the places at which Dynamo found them."""

from __future__ import annotations

import re
from ast import literal_eval
from collections import Counter

from torch import fx

from streamfx.ir.facts import Facts
from streamfx.node_meta import DESCRIPTION
from streamfx.torch_private import placeholder_source


def input_names(module: fx.GraphModule, facts: Facts) -> list[str]:
    """Return the names of a graph's inputs: paths of parameters and buffers in the model, and names of arguments.

    A name that inputs of several models or collections have follows theirs: `teacher.embed.weight`. `module`: Dynamo's graph. An
    input that is not Dynamo's keeps its name in the joint graph.
    """
    placeholders = module.graph.find_nodes(op="placeholder")
    indices = [getattr(primal.meta.get(DESCRIPTION), "idx", position) for position, primal in enumerate(facts.joint.primals)]
    sources = [placeholder_source(placeholders[index]) if index < len(placeholders) else "" for index in indices]
    counts = Counter(_path_of(source) for source in set(sources))
    result: list[str] = []
    for source, primal in zip(sources, facts.joint.primals, strict=True):
        path = _path_of(source)
        path = path if counts[path] == 1 else f"{_root_of(source)}.{path}"
        result.append(path if source and path not in result else primal.name)
    return result


def _path_of(source: str) -> str:
    """
    >>> _path_of("L['self']._modules['layers']._modules['0']._parameters['weight']"), _path_of("L['kwargs']['input_ids']")
    ('layers.0.weight', 'input_ids')
    """
    module_parts = _names_in(source, r"\._(?:modules|parameters|buffers)")
    if module_parts:
        return ".".join(module_parts)
    parts = _names_in(source)
    return ".".join(parts[-2:] if parts and parts[-1].isdigit() else parts[-1:])


def _root_of(source: str) -> str:
    """Return the name of the object of which `_path_of` returns the path inside.

    >>> _root_of("L['teacher']._modules['0']._parameters['weight']"), _root_of("L['second']['input_ids']")
    ('teacher', 'second')
    """
    module, is_module, _ = re.sub(r"\._(modules|parameters|buffers)\[", "\0", source).partition("\0")
    parts = _names_in(module if is_module else source)
    return parts[-1 if is_module else max(-len(parts), -3 if parts[-1].isdigit() else -2)]


def _names_in(source: str, before: str = "") -> list[str]:
    """Return the attributes, keys and numbers in a source; or only the keys after the pattern `before`."""
    key = rf"{before}\[('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")\]"
    if before:
        return [literal_eval(text) for text in re.findall(key, source)]
    found = re.findall(rf"{key}|\[(\d+)\]|\.(\w+)", source)
    return [literal_eval(text) if text else number or attribute for text, number, attribute in found]
