"""Generate Python source for a loop over chunks; values that are equal for all chunks are computed before the loop.

    def loop(run, bounds, step, chunks, env, tensors, buffers, results):
        [tensor_0, tensor_1] = tensors
        [buffer_0] = buffers
        [result_0] = results
        blocks = chunk_blocks(bounds)
        row_iterators = chunk_slices(tensor_1, 1, 1, blocks), chunk_slices(result_0, 1, 1, blocks)
        for (start, stop), rows_0, rows_1 in zip(bounds, *row_iterators):
            [out_0] = run(tensor_0, rows_0, buffer_0.narrow(2, 0, stop))
            copy_rows(rows_1, out_0)
            out_0 = None

`run` is the loop body, `start` and `stop` are the bounds of a chunk of the sequence, `rows_i` are the chunk's rows of a tensor or
result. A placement says which dimension of a tensor holds the sequence: a product of `outer` indices, the rows, and `inner`
indices. A derived axis is an axis whose rows are rows or blocks of the sequence from an offset on. Copies of rows are passed
to the loop body as temporaries, so that only the body holds a reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import sympy
from torch import Tensor

from streamfx.ir import program
from streamfx.ir.program import (
    CHUNK,
    Broadcast,
    BufferPart,
    ChunkSlice,
    ConcatOutput,
    Feed,
    FirstRow,
    IsFirst,
    LoopSpec,
    Number,
    Placement,
    RowSelection,
    Selector,
)
from streamfx.ir.sizes import Size, free_symbols, simplified
from streamfx.ir.span import Span
from streamfx.runtime.buffers import rows_of, rows_view
from streamfx.runtime.chunks import chunk_blocks, chunk_slices
from streamfx.runtime.runtime_sizes import BOUNDS, FUNCTIONS, SizePrinter, kind_of_size

INTEGER_EXPRESSIONS = (
    sympy.Add,
    sympy.Mul,
    sympy.Symbol,
    sympy.Integer,
)  # expressions over integers that are integers themselves
CHUNK_SYMBOLS = {program.START, program.STOP, program.CHUNK}


@dataclass(frozen=True)
class Code:
    """A Python expression; `is_varying` if its value differs between chunks."""

    text: str
    is_varying: bool = False

    def __str__(self) -> str:
        return self.text


START, STOP = Code("start", True), Code("stop", True)


class LoopWriter:
    """Generates the code that runs before a loop, and the code that runs for each chunk."""

    def __init__(self, spec: LoopSpec) -> None:
        """Start with empty code for a loop; `before_loop` and `per_chunk` collect the lines that assign variables."""
        self.spec = spec
        self.before_loop: list[str] = []
        self.per_chunk: list[str] = []
        self.uses_chunk_index = False
        self.row_iterators: dict[str, Code] = {}  # loop variables, keyed by the iterator that yields them
        self._variables: dict[str, tuple[Code, ...]] = {}  # keyed by the text of the assigned expression
        self._length = self.size(spec.length)

    # -- values with names

    def assign(self, code: Code, *hints: str) -> tuple[Code, ...]:
        """Return variables for a value, or for its items if there are several `hints`, which become their names.

        The line that assigns them runs before the loop, or for each chunk if the value varies. Equal expressions share their
        variables.
        """
        variables = self._variables.get(code.text)
        if variables is None:
            variables = tuple(Code(self.variable(hint), code.is_varying) for hint in hints)
            self._variables[code.text] = variables
            (self.per_chunk if code.is_varying else self.before_loop).append(f"{', '.join(map(str, variables))} = {code}")
        return variables

    def variable(self, hint: str) -> str:
        """Return the name of a new variable."""
        return f"{hint}_{len(self._variables)}"

    def size(self, size: Size) -> Code:
        """Return code for a size, or for another scalar that depends on sizes: a literal, a symbol, or an assigned variable."""
        if isinstance(size, int):
            return Code(str(size))
        symbols = free_symbols([size])
        is_varying, self.uses_chunk_index = not symbols.isdisjoint(CHUNK_SYMBOLS), self.uses_chunk_index or CHUNK in symbols
        type_of_size, size = kind_of_size(size), simplified(size.replace(_is_bound, self._bounds_variable))
        if size == program.STOP - program.START:
            return self._rows()
        text = SizePrinter().doprint(size)
        if text.isidentifier() or text.isdigit():
            return Code(text, is_varying)
        is_integer = all(isinstance(subexpression, INTEGER_EXPRESSIONS) for subexpression in sympy.preorder_traversal(size))
        return self.assign(Code(text if is_integer else f"{type_of_size.__name__}({text})", is_varying), "n")[0]

    def _rows(self) -> Code:
        """Return the variable that holds the number of rows of the current chunk, assigning it on first use."""
        return self.assign(Code("stop - start", True), "n")[0]

    def _bounds_variable(self, expression: Any) -> Any:
        """Replace a size function, for example `member_count(...)`, by a symbol that names a variable with its value.

        Its value is one of the two results of a bounds function (`member_bounds`), which is called once for both. If the
        value is a literal, the result is that integer.
        """
        bounds_function, index = BOUNDS[type(expression).__name__]
        text = self.bounds(bounds_function, [self._argument(argument) for argument in expression.args])[index].text
        return sympy.Integer(text) if text.isdigit() else sympy.Symbol(text, integer=True)

    def _argument(self, argument: Any) -> Code:
        """Return code for an argument: a literal, a name, or a variable that holds the value of a longer expression."""
        text = SizePrinter().doprint(argument)
        return Code(text) if text.isidentifier() or text.removeprefix("-").isdigit() else self.size(argument)

    def times(self, left: Code, right: Code) -> Code:
        """Return code for a product, in a variable; a factor of 1 is omitted."""
        if "1" in (left.text, right.text):
            return left if right.text == "1" else right
        return self.assign(Code(f"{left} * {right}", left.is_varying or right.is_varying), "n")[0]

    def bounds(self, function: str, arguments: Sequence[Code]) -> tuple[Code, Code]:
        """Return code for the two results of a bounds function of `runtime_sizes.py`: the first row and the number of rows.

        `function` is its name, and `arguments` are its arguments. If the axis is the sequence itself, simpler expressions replace
        the call.
        """
        texts = [argument.text for argument in arguments]
        length_code, length = self._length, self._length.text
        if function == "member_bounds" and texts[2:] == [length, "0", length]:
            return START, self._rows()
        if function == "span_bounds":
            low, high = texts[3:5]
            if (low, high) == ("None", "None"):
                return Code("0"), arguments[6]
            if texts[5:] == ["0", length] and (low == "None" or int(low) <= 0) and high in ("None", "0"):
                first = Code("0") if low == "None" else self.assign(Code(f"max(start + {low}, 0)", True), "first")[0]
                last = length_code if high == "None" else STOP
                return first, last if first.text == "0" else self.assign(Code(f"{last} - {first}", True), "n")[0]
        first_row, count = self.assign(Code(f"{function}({', '.join(texts)})", True), "first", "count")
        return first_row, count

    # -- rows

    def select_rows(self, tensor: Code, selections: Iterable[RowSelection], view: bool) -> Code:
        """Return code for the selected rows of a tensor, along one or several dimensions that hold the sequence.

        If an outer factor precedes the rows in their dimension: with `view`, it stays a separate dimension; otherwise it is
        flattened, which copies. The chunk's own slices of a tensor that is equal for all chunks become loop variables
        (`row_iterators`).
        """
        for placement, selector in selections:
            first, count = self._selected(placement, selector)
            outer, inner, dim = self.size(placement.outer), self.size(placement.inner), placement.dim
            rows = self.size(placement.rows.length)
            is_varying = tensor.is_varying or first.is_varying or count.is_varying
            if not isinstance(placement.outer, int):
                function = "rows_view" if view else "rows_of"
                tensor = Code(f"{function}({tensor}, {dim}, {outer}, {inner}, {rows}, {first}, {count})", is_varying)
                continue
            flatten_suffix = ""
            if placement.outer != 1:
                split = Code(f"{tensor}.unflatten({dim}, ({outer}, {self.times(rows, inner)}))", tensor.is_varying)
                tensor = split if split.is_varying else self.assign(split, "split")[0]
                dim, flatten_suffix = dim + 1, "" if view else f".flatten({dim}, {dim + 1})"
            tensor = self.slice_rows(tensor, dim, first, count, inner)
            tensor = Code(f"{tensor}{flatten_suffix}", tensor.is_varying)
        return tensor if tensor.is_varying or tensor.text.isidentifier() else self.assign(tensor, "part")[0]

    def slice_rows(self, tensor: Code, dim: int, first: Code, count: Code, inner: Code) -> Code:
        """Return code for `count` rows of a tensor from row `first` on, along dimension `dim` with `inner` elements per row."""
        if first is START and not tensor.is_varying:
            row_iterator = f"chunk_slices({tensor}, {dim}, {inner}, blocks)"
            return self.row_iterators.setdefault(row_iterator, Code(f"rows_{len(self.row_iterators)}", True))
        is_varying = tensor.is_varying or first.is_varying or count.is_varying
        return Code(f"{tensor}.narrow({dim}, {self.times(first, inner)}, {self.times(count, inner)})", is_varying)

    def _selected(self, placement: Placement, selector: Selector) -> tuple[Code, Code]:
        """Return code for the first row and the number of rows that a selector takes along the placement's axis.

        `selector`: a span of rows around the chunk, rows shifted from those of another axis, or None for the chunk's own rows.
        """
        offset, rows, block = self.size(placement.rows.offset), self.size(placement.rows.length), placement.rows.block
        chunk = (START, STOP, self._length)
        if isinstance(selector, Span):
            return self.bounds("span_bounds", (*chunk, Code(str(selector.low)), Code(str(selector.high)), offset, rows))
        if selector is None:
            return self.bounds("member_bounds", (*chunk, offset, rows, *[Code(str(block))] * (block != 1)))
        source_rows, shift = (self.size(selector.rows.offset), self.size(selector.rows.length)), self.size(selector.by)
        reach, block = Code(str(selector.reach)), selector.rows.block
        window = (reach, Code(str(block))) if block != 1 else (reach,) if selector.reach else ()
        return self.bounds("shifted_bounds", (*chunk, *source_rows, shift, rows, *window))

    # -- inputs of the loop body

    def argument(self, index: int | None) -> Code:
        """Return the name of a tensor argument of the loop."""
        return Code(f"tensor_{index}")

    def buffer(self, index: int) -> Code:
        """Return the name of a buffer of the loop."""
        return Code(f"buffer_{index}")

    def feeds(self, input_indices: Iterable[int]) -> list[str]:
        """Return code for these inputs of the loop body, by their indices; "None" for an input that the body does not use."""
        placeholders = self.spec.body.graph.find_nodes(op="placeholder")
        return [
            self._feed(self.spec.feeds[i], self.spec.sources[i]).text if placeholders[i].users else "None" for i in input_indices
        ]

    def _feed(self, feed: Feed, source: int | None) -> Code:
        """Return code for one input of the loop body; `source` is the index of the tensor it comes from, if any."""
        match feed:
            case Broadcast():
                return self.argument(source)
            case ChunkSlice():
                return self.select_rows(self.argument(source), feed.selections, view=False)
            case BufferPart():
                return self.select_rows(self.buffer(feed.buffer), feed.selections, view=True)
            case Number():
                return self.size(feed.value)
            case FirstRow():
                return START
            case IsFirst():
                return Code(f"stop == {self._length}" if self.spec.reverse else "start == 0", True)


def _is_bound(expression: Any) -> bool:
    """Return whether an expression is a size function whose value is one of the two results of a bounds function."""
    return type(expression).__name__ in BOUNDS


def copy_rows(destination: Tensor, rows: Tensor) -> None:
    """Copy rows into a chunk's slice of the result, which has one dimension more if outer indices precede the sequence in one."""
    destination.copy_(rows if rows.shape == destination.shape else rows.reshape(destination.shape))


def generate_loop(spec: LoopSpec, is_single: bool = False) -> Callable[..., None]:
    """Generate loop(run, bounds, step, chunks, env, tensors, buffers, results), which runs the body on each chunk.

    `run` is the body, `bounds` are the chunks, `step` their rows and `chunks` their number; `env` has the values of symbols.
    The function fills `results` in place. If `is_single`, there is one chunk, and `results` are functions of the computed rows
    that return (the result, whether the rows must be copied into it); the function replaces them by the results.
    """
    writer = LoopWriter(spec)
    concat_outputs = [output for output in spec.yields if isinstance(output, ConcatOutput)]
    feeds = writer.feeds(range(len(spec.feeds)))
    chunk_results = [f"out_{i}" for i in range(len(concat_outputs))]
    body = [f"[{', '.join(chunk_results)}] = run({', '.join(feeds)})"]
    for i, concat_output in enumerate(concat_outputs):
        result = Code(f"results[{i}]" if is_single else f"result_{i}", is_varying=is_single)
        copy_call = f"copy_rows({writer.select_rows(result, [RowSelection(concat_output.placement, None)], view=True)}, out_{i})"
        if is_single:
            body.append(f"results[{i}], is_empty = result_{i}(out_{i})")
            copy_call = f"if is_empty: {copy_call}"
        body.append(copy_call)
    body += [" = ".join([*chunk_results, "None"])] if chunk_results else []
    return _function(_loop_source(writer, body, len(concat_outputs)))


def generate_inputs(spec: LoopSpec, input_indices: Sequence[int]) -> Callable[..., Iterable[tuple[Any, ...]]]:
    """Generate a generator function that takes the arguments of `generate_loop`'s function, and runs no body.

    For each chunk, it yields a tuple of the body's inputs `input_indices`.
    """
    writer = LoopWriter(spec)
    feeds = writer.feeds(input_indices)
    num_results = sum(isinstance(output, ConcatOutput) for output in spec.yields)
    return _function(_loop_source(writer, [f"yield ({''.join(f'{feed}, ' for feed in feeds)})"], num_results))


def _loop_source(writer: LoopWriter, body: Sequence[str], num_results: int) -> str:
    """Return the source of the loop function: its arguments are unpacked, then code before the loop, then the loop.

    For each chunk, the loop runs the writer's code and then the lines of `body`. `num_results`: the number of concatenated
    outputs.
    """
    spec = writer.spec
    num_tensors = len({source for source in spec.sources if source is not None})
    unpacking = [f"{symbol.name} = env[{symbol.name!r}]" for symbol in spec.symbols]
    for name, count in (("tensor", num_tensors), ("buffer", len(spec.buffers)), ("result", num_results)):
        unpacking.append(f"[{', '.join(f'{name}_{i}' for i in range(count))}] = {name}s")
    chunk_index = [f"{CHUNK.name} = start // step"] if writer.uses_chunk_index else []
    lines = ["def loop(run, bounds, step, chunks, env, tensors, buffers, results):"]
    loop_header = "for start, stop in bounds:"
    if writer.row_iterators:
        names, row_iterators = ", ".join(map(str, writer.row_iterators.values())), ", ".join(writer.row_iterators)
        loop_header = f"for (start, stop), {names} in zip(bounds, {row_iterators}, strict=True):"
        unpacking.append("blocks = chunk_blocks(bounds)")
    lines += [f"    {line}" for line in (*unpacking, *writer.before_loop, loop_header)]
    lines += [f"        {line}" for line in (*chunk_index, *writer.per_chunk, *body)]
    return "\n".join(lines) + "\n"


@lru_cache(maxsize=1024)
def _function(text: str) -> Callable[..., Any]:
    """Compile the source of a function `loop` and return the function. The cache shares it between loops of equal layers."""
    namespace = {
        **FUNCTIONS,
        "rows_of": rows_of,
        "rows_view": rows_view,
        "chunk_blocks": chunk_blocks,
        "chunk_slices": chunk_slices,
        "copy_rows": copy_rows,
    }
    exec(compile(text, "streamfx's loop", "exec"), namespace)
    function: Callable[..., Any] = namespace["loop"]
    return function
