"""Write a loop over chunks as a Python function, from the `LoopSpec` that runs and with the generator of its slices.

def model_layers_1_backward(add, self_attn_q_proj_weight):
    grad_self_attn_q_proj_weight = torch.zeros([32, 32], dtype=torch.float64)
    for start in reversed(range(0, 24, 8)):
        stop = min(start + 8, 24)
        # model.py:31: q = self.q_proj(x)
        ...
        grad_self_attn_q_proj_weight += t @ reshape
    return grad_self_attn_q_proj_weight
"""

from __future__ import annotations

import builtins
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import torch
from torch import fx

from streamfx.ir.program import Buffer, BufferOutput, BufferPart, ChunkSlice, ConcatOutput, LoopSpec, Placement, RowSelection
from streamfx.kernels import accumulate
from streamfx.node_meta import JOINT
from streamfx.runtime import buffers as buffer_ops
from streamfx.runtime.loop_codegen import Code
from streamfx.tools.report.as_python.attention_roles import ATTENTION_RESULTS, attention_roles
from streamfx.tools.report.as_python.identifiers import Identifiers, stem
from streamfx.tools.report.as_python.module_globals import ModuleGlobals
from streamfx.tools.report.as_python.operator_calls import VIEWS, CallWriter, argument_text, atom
from streamfx.tools.report.as_python.slice_writer import MINUS, SliceWriter
from streamfx.torch_private import OpOverload
from streamfx.torch_private.lines import frame_of

RESERVED = ("torch", "aten", "start", "stop", "length", "chunk", "chunk_size", "chunks", "math", *dir(builtins))


@dataclass(frozen=True)
class LoopHints:
    """Hints for names in a loop: of its tensor arguments, and of its results by label.

    `is_backward`: whether an operator, by its name in the joint graph, computes gradients. `dtypes`: of values, by that name.
    """

    arguments: Sequence[str]
    results: Mapping[str, str]
    is_backward: Callable[[str], bool]
    dtypes: Mapping[str, torch.dtype]


class LoopFunctionWriter:
    """Writes one loop."""

    def __init__(self, spec: LoopSpec, hints: LoopHints, module: ModuleGlobals) -> None:
        self.spec, self.hints, self.module = spec, hints, module
        self.placeholders = spec.body.graph.find_nodes(op="placeholder")
        self.feed_of = dict(zip(self.placeholders, spec.feeds, strict=True))
        self.source_of = dict(zip(self.placeholders, spec.sources, strict=True))
        self.names = Identifiers((*RESERVED, *(symbol.name for symbol in spec.symbols), *module.names_in_use))
        roles = attention_roles(spec)
        self.node_hints = roles.nodes
        self.arguments = [self.names.new(roles.arguments.get(i, hint)) for i, hint in enumerate(hints.arguments)]
        buffer_labels = {out.buffer: label for out, label in self._labeled_outputs() if isinstance(out, BufferOutput)}
        self.buffers = [
            self.names.new(roles.buffers.get(i) or self._buffer_hint(buffer, buffer_labels.get(i, "")))
            for i, buffer in enumerate(spec.buffers)
        ]
        self.results: list[tuple[ConcatOutput, str]] = []
        outputs: Any = spec.body.graph.output_node().args[0]
        concat_outputs = [(out, label) for out, label in self._labeled_outputs() if isinstance(out, ConcatOutput)]
        for (output, label), node in zip(concat_outputs, outputs, strict=True):
            hint = hints.results.get(label) or f"{self.node_hints.get(node) or stem(label)}_all"
            self.results.append((output, self.names.new(hint)))
            self.node_hints.setdefault(node, hint.removesuffix("_all"))
        self.writer = SliceWriter(spec, self.arguments, self.buffers, self.names)
        self.calls = CallWriter(module, self.text)
        self.expressions: dict[fx.Node, str] = {}  # of nodes that have no variable
        self.lines: list[str] = []  # of the body

    def function(self) -> tuple[str, ...]:
        """Return the lines of a function of the values of the loop's symbols and of its tensors.

        In the first two lines, `{name}` and `{purpose}` stand for its name, and for what it is for.
        """
        destinations = [self._rows(name, output.placement) for output, name in self.results]
        self._write_body()
        outputs: Sequence[Any] = self.spec.body.graph.output_node().args[0]  # type: ignore[assignment]
        for destination, (output, _), value in zip(destinations, self.results, outputs, strict=True):
            self._store(destination, self.text(value), output.placement)
        returned = [name for _, name in self.results]
        returned += [self._finished(out) for out, _ in self._labeled_outputs() if isinstance(out, BufferOutput)]
        self.returned = returned
        lines = [f"def {{name}}({', '.join([*(symbol.name for symbol in self.spec.symbols), *self.arguments])}):"]
        direction = "last chunk to the first" if self.spec.reverse else "first chunk to the last"
        lines += [f'    """{{purpose}}, from the {direction}."""', *(f"    {line}" for line in self._lines_of_loop())]
        lines.append(f"    return {', '.join(returned)}")
        return tuple(lines)

    # -- names

    def _labeled_outputs(self) -> list[tuple[Any, str]]:
        return list(zip(self.spec.yields, self.spec.labels, strict=True))

    def _buffer_hint(self, buffer: Buffer, label: str) -> str:
        """Return a hint for the name of a buffer; `label`: of the loop's result that it is, or ""."""
        return self.hints.results.get(label) or f"{stem(buffer.name)}_{'total' if buffer.is_sum else 'all'}"

    def text(self, value: Any) -> str:
        """Return a value of the body, or a constant, as an expression."""
        return argument_text(value, self.module, self.expressions.__getitem__)

    def _assign(self, node: fx.Node, text: str) -> None:
        """Append the line that assigns an expression to a variable for the node; a value without users has none."""
        if not node.users:
            self.lines.append(text)
            return
        self.expressions[node] = name = self.names.new(self.node_hints.get(node) or self._hint(node))
        self.lines.append(f"{name} = {text}")

    def _hint(self, node: fx.Node) -> str:
        """Return a name for a value that is equal in equal layers."""
        if node.op == "placeholder":
            source = self.source_of[node]
            return stem(node.name) if source is None else f"{self.arguments[source].removesuffix('_all')}_rows"
        if node.target is operator.getitem:
            return f"{self._hint(node.args[0])}_{node.args[1]}"  # type: ignore[arg-type]
        if node.target is buffer_ops.complete:
            return f"{self._buffer_of(node.args[0]).removesuffix('_all')}_rows"
        if isinstance(node.target, OpOverload):
            return stem(node.target.overloadpacket.__name__)
        return stem(getattr(node.target, "__name__", node.name))

    # -- the body

    def _write_body(self) -> None:
        """Write the operators of the body, with the user's line before those that come from it."""
        uses = Counter(operand for node in self.spec.body.graph.nodes for operand in node.all_input_nodes)
        feeds = dict(zip(self.placeholders, self.writer.feeds(range(len(self.placeholders))), strict=True))
        for node, feed in feeds.items():
            if uses[node] == 1 or not isinstance(self.feed_of[node], ChunkSlice):
                self.expressions[node] = feed
        previous = ""
        for node in self.spec.body.graph.nodes:
            if node.op not in ("call_function", "call_module"):
                continue
            for operand in node.all_input_nodes:
                if operand.op == "placeholder" and operand not in self.expressions:
                    self._assign(operand, feeds[operand])
            count, comment = len(self.lines), self._comment(node)
            self._write_node(node)
            if len(self.lines) > count and comment and comment != previous:
                self.lines.insert(count, comment)
                previous = comment

    def _comment(self, node: fx.Node) -> str:
        """Return the user's line from which an operator was traced, as a comment; "" if unknown."""
        frame = frame_of(node)
        if frame is None:
            return ""
        file, line, _, code = frame
        backward = self.hints.is_backward(str(node.meta.get(JOINT, "")))
        place = f"{PurePath(file).name}:{line}"
        return f"# {'backward of ' if backward else ''}{place}: {code.strip()}".rstrip(": ")

    def _write_node(self, node: fx.Node) -> None:
        """Write one operator; the functions that fill buffers and add to totals are written as assignments."""
        write = STATEMENTS.get(node.target)
        if node.op == "call_module":  # a mask program
            program = self.spec.body.get_submodule(str(node.target))
            self._assign(node, f"{self.module.text(program)}({', '.join(map(self.text, node.args))})")
        elif write is not None:
            write(self, node)
        elif (node.target is operator.getitem and node in self.expressions) or self._unpack(node):
            return
        elif node.target in VIEWS and len(node.users) == 1 and node not in self.node_hints:
            self.expressions[node] = self.calls.expression(node)  # written where it is used
        else:
            self._assign(node, self.calls.expression(node))

    def _unpack(self, node: fx.Node) -> bool:
        """Write a call with several results as `a, b = call(...)`, if all its users select results; return whether it was."""
        count = len(ATTENTION_RESULTS.get(node.target, ())) or len(getattr(getattr(node.target, "_schema", None), "returns", ()))
        if count < 2 or any(user.target is not operator.getitem for user in node.users):
            return False
        names: dict[Any, str] = {}  # by index of the result
        text = self.calls.expression(node)
        for user in node.users:
            index = user.args[1]
            names[index] = names.get(index) or self.names.new(self.node_hints.get(user) or self._hint(user))
            self.expressions[user] = names[index]
        self.lines.append(f"{', '.join(names.get(i, '_') for i in range(count))} = {text}")
        return True

    def _buffer_of(self, placeholder: Any) -> str:
        """Return the name of the buffer that a placeholder slices."""
        feed = self.feed_of[placeholder]
        assert isinstance(feed, BufferPart)
        return self.buffers[feed.buffer]

    def _append(self, node: fx.Node) -> None:
        """Write `all[:, start:stop] = value`; the call stands for the rows that the chunk reads, `all[:, :stop]`."""
        visible, own, value, _ = node.args
        placement = self._placement(own)
        self._store(self.text(own), self.text(value), placement)
        self.expressions[node] = self._flattened(self.text(visible), placement)

    def _add_rows(self, node: fx.Node) -> None:
        """Write `total[:, :stop] += value`."""
        visible, part, _ = node.args
        self._add(self.text(visible), self._split(self.text(part), self._placement(visible)))

    def _complete(self, node: fx.Node) -> None:
        """Write the chunk's rows of a sum over chunks, to which no later chunk adds."""
        own, _, _, dtype = node.args
        text = self._flattened(self.text(own), self._placement(own))
        feed = self.feed_of[own]  # type: ignore[index]
        assert isinstance(feed, BufferPart)
        self._assign(node, text if self.spec.buffers[feed.buffer].dtype == dtype else f"{text}.to({dtype})")

    def _add_part(self, node: fx.Node) -> None:
        total, part, _ = node.args
        self._add(self.text(total), self.text(part))

    def _add_product(self, node: fx.Node) -> None:
        """Write `total += left @ right`."""
        total, left, right, _ = node.args
        feed = self.feed_of[total]  # type: ignore[index]
        assert isinstance(feed, BufferPart)
        dtype = self.spec.buffers[feed.buffer].dtype
        factors = [f"{self.calls.object(factor)}{self._conversion(factor, dtype)}" for factor in (left, right)]
        self._add(self.text(total), " @ ".join(factors))

    def _conversion(self, factor: Any, dtype: Any) -> str:
        """Return `.to(dtype)`, unless the factor is known to have the total's dtype."""
        return "" if self.hints.dtypes.get(str(factor.meta.get(JOINT))) == dtype else f".to({dtype})"

    def _add(self, total: str, part: str) -> None:
        self.lines.append(f"{total} += {part}" if total[-1] == "]" or total.isidentifier() else f"{total}.add_({part})")

    # -- rows

    def _placement(self, placeholder: Any) -> Placement:
        """Return where the buffer that a placeholder slices holds the sequence."""
        feed = self.feed_of[placeholder]
        assert isinstance(feed, BufferPart)
        return feed.selections[0].placement

    def _rows(self, tensor: str, placement: Placement) -> str:
        """Return the chunk's rows of a result, as a view."""
        return self.writer.select_rows(Code(tensor), [RowSelection(placement, None)], view=True).text

    def _store(self, destination: str, value: str, placement: Placement) -> None:
        """Write the copy of a chunk's rows into a slice."""
        value = self._split(value, placement)
        self.lines.append(f"{destination} = {value}" if destination[-1] == "]" else f"{destination}.copy_({value})")

    def _split(self, value: str, placement: Placement) -> str:
        """Return rows with the indices before the sequence in its dimension as a dimension of their own, as slices have."""
        if placement.outer == 1:
            return value
        return f"{atom(value)}.unflatten({placement.dim}, ({self.writer.size(placement.outer)}, -1))"

    @staticmethod
    def _flattened(rows: str, placement: Placement) -> str:
        """Undo `_split`."""
        return rows if placement.outer == 1 else f"{rows}.flatten({placement.dim}, {placement.dim + 1})"

    # -- around the body

    def _lines_of_loop(self) -> Iterator[str]:
        """Yield the lines around the body: sizes, buffers and results, then the loop."""
        writer, spec = self.writer, self.spec
        length = writer.size(spec.length)
        chunk = self._chunk_size()
        allocations = [self._allocation(name, output, False) for output, name in self.results]
        allocations += [
            self._allocation(name, item, item.zeroed or item.is_sum)
            for name, item in zip(self.buffers, spec.buffers, strict=True)
        ]
        chunk_index = ["chunk = start // chunk_size"] if writer.uses_chunk_index else []
        per_chunk = _used_lines([*chunk_index, *writer.per_chunk], self.lines)
        before = _used_lines(writer.before_loop, [*per_chunk, *self.lines, *allocations, *self.returned])
        yield f"length, chunk_size = {length}, {chunk}  # in rows"
        if any(re.search(r"\bchunks\b", line) for line in (*per_chunk, *self.lines, *before, *allocations)):
            yield "chunks = -(-length // chunk_size)"
        sizes, views = _split_at_names(before, [*(name for _, name in self.results), *self.buffers])
        yield from map(self.module.sizes, (*sizes, *allocations, *views))
        starts = "range(0, length, chunk_size)"
        yield f"for start in {f'reversed({starts})' if spec.reverse else starts}:"
        yield "    stop = min(start + chunk_size, length)"
        for line in map(self.module.sizes, (*per_chunk, *self.lines)):
            yield "    " + MINUS.sub(r" - \1\2", line)

    def _chunk_size(self) -> str:
        """Return the number of rows of a chunk: fixed, or computed from the sizes of a call."""
        chunk, length = self.spec.chunk_size, self.spec.length
        if isinstance(chunk, int):
            return str(chunk)
        sizes = (length, chunk.row_bytes, chunk.stream_bytes)
        if all(isinstance(size, int) for size in sizes):
            return str(chunk.rows(*sizes))  # type: ignore[arg-type]
        return f"{self.module.text(chunk)}.rows({', '.join(str(self.writer.size(size)) for size in sizes)})"

    def _allocation(self, name: str, memory: Buffer | ConcatOutput, zeroed: bool) -> str:
        """Return the line that allocates a buffer or a result; totals begin with zero."""
        shape = ", ".join(str(self.writer.size(size)) for size in memory.shape)
        device = "" if str(memory.device) == "cpu" else f", device={self.module.text(memory.device)}"
        return f"{name} = torch.{'zeros' if zeroed else 'empty'}([{shape}], dtype={memory.dtype}{device})"

    def _finished(self, output: BufferOutput) -> str:
        """Return a buffer as a result: divided by the count of a mean, and in the result's dtype."""
        name, buffer = self.buffers[output.buffer], self.spec.buffers[output.buffer]
        text = name if output.count == 1 else f"({name} / {self.writer.size(output.count)})"
        return text if buffer.dtype == output.dtype else f"{text}.to({output.dtype})"


STATEMENTS: dict[Any, Callable[[LoopFunctionWriter, fx.Node], None]] = {
    buffer_ops.append: LoopFunctionWriter._append,
    buffer_ops.add_rows: LoopFunctionWriter._add_rows,
    buffer_ops.complete: LoopFunctionWriter._complete,
    accumulate.add_part: LoopFunctionWriter._add_part,
    accumulate.add_product: LoopFunctionWriter._add_product,
}


def _mentions(line: str, names: Sequence[str]) -> bool:
    """Return whether a line uses one of these names."""
    return any(re.search(rf"\b{re.escape(name)}\b", line) for name in names)


def _split_at_names(assignments: Sequence[str], names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the assignments that do not depend on these names, and those that do."""
    independent, dependent, dependent_names = list[str](), list[str](), list(names)
    for line in assignments:
        is_dependent = _mentions(line, dependent_names)
        (dependent if is_dependent else independent).append(line)
        dependent_names += line.split(" = ", 1)[0].split(", ") if is_dependent else []
    return independent, dependent


def _used_lines(assignments: Sequence[str], users: Sequence[str]) -> list[str]:
    """Return the assignments whose variables are used by `users` or by later assignments that are used."""
    used = list(users)
    for line in reversed(assignments):
        targets = line.split(" = ", 1)[0].split(", ")
        if _mentions("\n".join(used), targets):
            used.insert(0, line)
    return used[: len(used) - len(users)]
