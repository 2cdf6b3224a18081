"""Write the rewritten graphs of a call as one runnable Python module: a function per loop, and the host programs that call them.

Loops whose code is equal, as those of equal layers, share one function. Every line is written from the `Program` that runs.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from streamfx.errors import ReportError
from streamfx.ir.facts import Facts
from streamfx.ir.joint import is_tensor, outputs_of, saved_values, sort_sizes_first
from streamfx.ir.program import LoopSpec
from streamfx.node_meta import JOINT, VALUE
from streamfx.runtime.loop import Loop
from streamfx.tools.report.as_python.attention_roles import attention_roles
from streamfx.tools.report.as_python.host_function import HostFunctionWriter, gradient_hints
from streamfx.tools.report.as_python.identifiers import Identifiers, in_docstring, on_one_line, stem, wrapped
from streamfx.tools.report.as_python.loop_function import STATEMENTS, LoopFunctionWriter, LoopHints
from streamfx.tools.report.as_python.module_globals import ModuleGlobals
from streamfx.tools.report.as_python.operator_calls import INFIX, graph_function
from streamfx.tools.report.stage_table import loops_of
from streamfx.tools.report.stage_titles import names_together
from streamfx.torch_private import OpOverload

aten = torch.ops.aten
HALVES = ("forward", "backward")
HEAD = '''"""One step of {name} as streamfx runs it: a loop runs a part of the model on one chunk of the sequence after the other.

- `x[:, start:stop]` are the rows of a chunk. Its queries also read keys of earlier rows: `key_all[:, :stop]` are all keys up to
  the chunk's end, `key_all[:, first:stop]` those of a window.
- `first_query` is the place of the chunk's first row among these keys. With `window=(-99, 0)`, a query sees the key of its own
  row and the 99 before it; None is no limit.
- `grad_weight += ...` adds a chunk's part of the gradient of a weight. The gradient is zero before the loop.
- A comment is the line of the model's code from which the next lines come. In backward loops, lines that do not begin with
  "backward of" are computed again.
- This module is written from the program that runs, which also frees each value after its last use and reuses memory.
{usage}"""
'''
USAGE = """
forward{i}(*inputs) returns (outputs, saved values), and backward{i}(*saved values, *gradients of outputs) the gradients of the
inputs. step{i}(*inputs) runs both and returns (outputs, gradients). INPUTS{i} has the names of the inputs, in order.
"""
STEP = '''
def step{i}(*inputs, gradients=None):
    """Return the outputs, and the gradients of the inputs; `gradients` of the outputs: by default 1 for numbers, 0 for others."""
    outputs, saved = forward{i}(*inputs)
    if gradients is None:
        with_gradient = [outputs[i] for i in {trained}]
        gradients = [torch.ones_like(out) if out.dim() == 0 else torch.zeros_like(out) for out in with_gradient]
    return outputs, backward{i}(*saved, *gradients)
'''


@dataclass(frozen=True)
class StepGraph:
    """A graph to write: its host programs, with the facts about it, and the names of its inputs."""

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    num_outputs: int
    facts: Facts
    input_names: Sequence[str]


@dataclass
class WrittenLoop:
    """A function for one or several loops: its lines, its name, what it does, and the stages whose loops it runs."""

    lines: tuple[str, ...]
    name: str
    verb: str
    stages: list[str] = field(default_factory=list)

    @property
    def stages_in_order(self) -> list[str]:
        """The names of the stages, each once."""
        return [name for name in dict.fromkeys(self.stages) if name]

    def text(self) -> str:
        """Return the function."""
        stages = self.stages_in_order
        purpose = f"{self.verb} {names_together(stages) if stages else 'values between stages'}"
        purpose = in_docstring(purpose)
        return _text(line.format(name=self.name, purpose=purpose) if i < 2 else line for i, line in enumerate(self.lines))


def _short(path: str) -> str:
    """Return a parameter's path inside its layer: without what precedes the layer's number, and without the number.

    >>> _short("model.layers.0.mlp.down_proj.weight"), _short("norms.3.weight"), _short("lm_head.weight")
    ('mlp.down_proj.weight', 'norms.weight', 'lm_head.weight')
    """
    parts = path.split(".")
    number = next((i for i, part in enumerate(parts[:-1]) if part.isdigit()), None)
    if number is None:
        return path
    inside = parts[number + 1 :]
    return ".".join(inside if len(inside) > 1 else [*parts[max(number - 1, 0) : number], *inside])


class StepModuleWriter:
    """Writes graphs as a module."""

    def __init__(self, graphs: Sequence[StepGraph], name: str) -> None:
        self.graphs, self.name = graphs, name
        self.module = ModuleGlobals(lambda graph, is_mask: graph_function(graph, self.module, is_mask))
        self.not_selected = ModuleGlobals(lambda graph, is_mask: graph_function(graph, self.not_selected, is_mask))
        self.loops: dict[tuple[str, ...], WrittenLoop] = {}  # by lines
        self.loop_of: dict[int, WrittenLoop] = {}  # by id of the `Loop`
        for graph in graphs:
            self._import_functions(graph)

    def text(self, stage: int | str | None = None, half: str | None = None) -> str:
        """Return the module; with a stage or a half only the functions of its loops. Raises `ReportError` for an unknown one."""
        if half not in (None, *HALVES):
            raise ReportError("code takes half='forward' or half='backward'", found=repr(half), do="omit it for both")
        selected = None if stage is None else self._loops_of_stage(stage)
        hosts: list[str] = []
        for index, writer in enumerate(self._write_loops(selected, half)):
            if stage is None:
                hosts += writer.host_texts(f"_{index}" if index else "", half)
        functions = [loop.text() for loop in self.loops.values()]
        definitions = [_text(text.splitlines()) for text in self.module.definitions]
        usage = (
            "".join(USAGE.format(i=f"_{i}" if i else "") for i in range(len(self.graphs)))
            if stage is None and half is None
            else ""
        )
        head = [
            HEAD.format(name=in_docstring(self.name), usage=usage),
            "import torch",
            "",
            "import streamfx.frontend.backend  # registers the operators of streamfx",
        ]
        code = "\n".join((*functions, *hosts, *definitions, *(line for line in self.module.imports if " = FUNCTIONS" in line)))
        head += [line for line in self.module.imports if re.search(rf"\b{_imported_name(line)}\b", code)]
        head += ["", "aten = torch.ops.aten", ""]
        return "\n".join([*head, *(f"\n{text}" for text in (*functions, *hosts)), *definitions])

    def loop_functions(self) -> list[WrittenLoop]:
        """Return the functions of all loops, in the order in which they run."""
        self._write_loops(None, None)
        return list(self.loops.values())

    def _write_loops(self, selected: set[int] | None, half: str | None) -> list[_GraphWriter]:
        """Write the functions of all loops, or of the selected ones (by id); return the writer of each graph."""
        writers = [_GraphWriter(graph, self) for graph in self.graphs]
        for writer in writers:
            for name in HALVES:
                writer.write_loops(name, selected, half)
        return writers

    def _loops_of_stage(self, stage: int | str) -> set[int]:
        """Return the ids of the loops of a stage, given by its index or its name."""
        stages = [(graph.facts, found) for graph in self.graphs for found in graph.facts.found_stages or ()]
        if isinstance(stage, int) and -len(stages) <= stage < len(stages):
            matching = [stages[stage]]
        else:
            matching = [(facts, found) for facts, found in stages if found.name == stage]
        if not matching:
            names = ", ".join(repr(found.name) for _, found in stages)
            raise ReportError("code takes the index or the name of a stage", found=repr(stage), do=f"give one of {names}")
        return {id(loop) for facts, found in matching if facts.program is not None for loop in loops_of(found, facts)}

    def _import_functions(self, graph: StepGraph) -> None:
        """Import all functions that the graph calls, so that no local name hides one."""
        hosts = [host for host in (graph.forward, graph.backward) if host is not None]
        bodies = [module.spec.body for host in hosts for module in host.children() if isinstance(module, Loop)]
        for module in (*hosts, *bodies):
            targets = [node.target for node in module.graph.nodes if node.op == "call_function"]
            for target in targets:
                if not isinstance(target, OpOverload) and target not in (*INFIX, *STATEMENTS, operator.getitem):
                    self.module.text(target)

    def add_loop(self, lines: tuple[str, ...], hint: str, verb: str, stage: str) -> WrittenLoop:
        """Return the function with these lines: a new one, or an equal one."""
        if lines not in self.loops:
            self.loops[lines] = WrittenLoop(lines, self.module.names.new(hint), verb)
        self.loops[lines].stages.append(stage)
        return self.loops[lines]


class _GraphWriter:
    """Writes the loops and the host programs of one graph."""

    def __init__(self, graph: StepGraph, step: StepModuleWriter) -> None:
        self.graph, self.step, self.facts = graph, step, graph.facts
        joint = graph.facts.joint
        self.hosts = {name: host for name, host in zip(HALVES, (graph.forward, graph.backward), strict=True) if host is not None}
        self.saved = {} if graph.backward is None else saved_values(graph.forward.graph, graph.backward.graph, graph.num_outputs)
        names = dict(zip((primal.name for primal in joint.primals), graph.input_names, strict=True))
        self.input_of = {node: names.get(node.name, node.name) for node in graph.forward.graph.find_nodes(op="placeholder")}
        gradients = {}
        if graph.backward is not None:
            results = outputs_of(graph.backward.graph)
            gradients = {names[primal.name]: results[i] for i, primal, _ in joint.trained}
        self.gradients = gradient_hints(gradients, self.saved)
        self.names = {node: _short_gradient(hint) for node, hint in self.gradients.items()}  # of results of loops
        for host in self.hosts.values():
            for call, loop in loop_calls(host):
                for source, role in attention_roles(loop.spec).arguments.items():
                    self.names.setdefault(self._value(call.args[len(loop.spec.symbols) + source]), role)
        self.dtypes = {node.name: node.meta[VALUE].dtype for node in (*joint.sources, *joint.nodes) if is_tensor(node)}
        self.backward_names = {node.name for node in joint.nodes if node not in joint.forward}
        self.stage_of = {
            node.name: stage.name for stage in self.facts.found_stages or () for node in (*stage.forward, *stage.backward)
        }

    def _value(self, value: Any) -> Any:
        """Return the forward value that a saved value of the backward program is; other values unchanged."""
        return self.saved.get(value, value) if isinstance(value, fx.Node) else value

    def write_loops(self, name: str, selected: set[int] | None, half: str | None) -> None:
        """Write the functions of a host program's loops, or of the selected ones only (by id)."""
        for call, loop in loop_calls(self.hosts[name]) if name in self.hosts else ():
            is_selected = half in (None, name) and (selected is None or id(loop) in selected)
            module = self.step.module if is_selected else self.step.not_selected  # loops that are not written name results, too
            labels = loop.spec.labels
            writer = LoopFunctionWriter(loop.spec, self._hints(loop.spec, call), module)
            lines = writer.function()
            for user in call.users:
                self.names.setdefault(user, writer.returned[user.args[1]])  # type: ignore[index]
            if not is_selected:
                continue
            stage = next((self.stage_of[label] for label in labels if label in self.stage_of), "")
            has_gradients = not self.backward_names.isdisjoint(labels)
            verb = "Gradients of" if has_gradients and name == "backward" else "Run" if name == "forward" else "Recompute"
            self.step.loop_of[id(loop)] = self.step.add_loop(lines, str(call.target), verb, stage)

    def _hints(self, spec: LoopSpec, call: fx.Node) -> LoopHints:
        """Return hints for the names in a loop: inputs by their path inside the layer, so that equal layers have equal names."""
        arguments = [self._hint(argument) for argument in call.args[len(spec.symbols) :]]
        results = {spec.labels[user.args[1]]: self.names[user] for user in call.users if user in self.names}  # type: ignore[index]
        return LoopHints(arguments, results, self.backward_names.__contains__, self.dtypes)

    def _hint(self, value: Any) -> str:
        """Return a hint for the name of a value that a loop reads."""
        if not isinstance(value, fx.Node):
            return "number"
        value = self._value(value)
        if value in self.input_of:
            return _short(self.input_of[value])
        if value in self.names:
            return self.names[value] if value in self.gradients else stem(self.names[value])
        if value.op == "placeholder":
            return "grad_output"
        if value.target is aten.t.default:
            return f"{self._hint(value.args[0])}_t"
        return stem(str(value.meta.get(JOINT) or value.name))

    def host_texts(self, suffix: str, half: str | None) -> Iterator[str]:
        """Yield the functions of both host programs, and `step`."""
        names = Identifiers(self.step.module.names_in_use)
        loop_names = {loop: written.name for loop, written in self.step.loop_of.items()}
        forward_names = {node: names.new(name) for node, name in self.input_of.items()}
        forward = HostFunctionWriter(
            self.graph.forward,
            loop_names,
            forward_names,
            self.gradients,
            self.step.not_selected if half == "backward" else self.step.module,
            self.saved.values(),
        )
        body = forward.lines(self._forward_results)
        inputs = ", ".join(forward_names.values())
        if half in (None, "forward"):
            yield _text([f"INPUTS{suffix} = ({''.join(f'{name!r}, ' for name in self.graph.input_names)})"])
            doc = '"""Return the outputs, and the values that are saved for the backward function."""'
            yield _text([f"def forward{suffix}({inputs}):", *(f"    {line}" for line in (doc, *body))])
        if self.graph.backward is None or half == "forward":
            return
        placeholders = self.graph.backward.graph.find_nodes(op="placeholder")
        backward_names = {
            node: forward.expressions[self.saved[node]] if node in self.saved else names.new("grad_output")
            for node in placeholders
        }
        backward_names = _distinct(backward_names)
        backward = HostFunctionWriter(self.graph.backward, loop_names, backward_names, self.gradients, self.step.module)
        body = backward.lines(self._backward_results)
        doc = '"""Return the gradients of the inputs."""'
        yield _text([f"def backward{suffix}({', '.join(backward_names.values())}):", *(f"    {line}" for line in (doc, *body))])
        if half is None:
            yield STEP.format(i=suffix, trained=self._trained_outputs()).lstrip("\n")

    def _forward_results(self, writer: HostFunctionWriter, results: Sequence[Any]) -> Iterator[str]:
        """Yield the lines that return the outputs, and the saved values in the order of the backward function's arguments."""
        count = self.graph.num_outputs
        yield f"outputs = ({''.join(f'{writer.text(value)}, ' for value in results[:count])})"
        saved = sort_sizes_first(results[count:])
        yield f"saved = ({''.join(f'{writer.text(value)}, ' for value in saved)})"
        yield "return outputs, saved"

    def _backward_results(self, writer: HostFunctionWriter, results: Sequence[Any]) -> Iterator[str]:
        """Yield the lines that return the gradient of each input."""
        yield "return ("
        for i, value in enumerate(results):
            name = self.graph.input_names[i] if i < len(self.graph.input_names) else ""
            yield f"    {writer.text(value)},  # {on_one_line(name)}"
        yield ")"

    def _trained_outputs(self) -> list[int]:
        """Return the indices of the outputs whose gradients the backward function gets, found by shape and dtype, in order."""
        joint, found, position = self.facts.joint, list[int](), 0
        for tangent in joint.tangents:
            wanted = tangent.meta[VALUE]
            while position < len(joint.outputs) and not _is_like(joint.outputs[position], wanted):
                position += 1
            found.append(position)
            position += 1
        return found


def loop_calls(host: fx.GraphModule) -> Iterator[tuple[fx.Node, Loop]]:
    """Yield the calls of loops in a host program, and the loops."""
    for call in host.graph.find_nodes(op="call_module"):
        loop = host.get_submodule(str(call.target))
        if isinstance(loop, Loop):
            yield call, loop


def _imported_name(line: str) -> str:
    """Return the name that a line imports, or defines: the last word, or the first of an assignment."""
    return line.split()[0 if " = " in line else -1]


def _is_like(output: Any, value: Any) -> bool:
    """Return whether an output has the shape and dtype of a value."""
    found = output.meta.get(VALUE) if isinstance(output, fx.Node) else None
    return isinstance(found, torch.Tensor) and found.shape == value.shape and found.dtype == value.dtype


def _short_gradient(hint: str) -> str:
    return f"grad_{_short(hint.removeprefix('grad_'))}"


def _distinct(names: Mapping[fx.Node, str]) -> dict[fx.Node, str]:
    """Return the names of arguments, each once: a value that is saved twice has two."""
    identifiers = Identifiers()
    return {node: identifiers.new(name) for node, name in names.items()}


def _text(lines: Any) -> str:
    """Join lines of code, and break the long ones."""
    return "\n".join(part for line in lines for part in wrapped(line)) + "\n"
