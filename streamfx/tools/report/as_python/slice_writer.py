"""Slices of a chunk's rows in the notation of Python, by the generator of the code that runs."""

from __future__ import annotations

import re
from collections.abc import Sequence

import sympy

from streamfx.ir.program import START, STOP, LoopSpec
from streamfx.ir.sizes import Size
from streamfx.runtime.loop_codegen import Code, LoopWriter
from streamfx.tools.report.as_python.identifiers import Identifiers

MINUS = re.compile(r" \+ (?:\(\(-1\)\*(\w+)\)|-(\d+))")  # of generated sizes: `a + ((-1)*b)`, `a + -1`


class SliceWriter(LoopWriter):
    """Generates the slices of a chunk as `x[:, start:stop]`; tensors and buffers have names."""

    def __init__(self, spec: LoopSpec, arguments: Sequence[str], buffers: Sequence[str], names: Identifiers) -> None:
        self._arguments, self._buffers, self._names = arguments, buffers, names
        super().__init__(spec)

    def variable(self, hint: str) -> str:
        return self._names.new(hint)

    def argument(self, index: int | None) -> Code:
        assert index is not None
        return Code(self._arguments[index])

    def buffer(self, index: int) -> Code:
        return Code(self._buffers[index])

    def size(self, size: Size) -> Code:
        """Return code for a size; a multiple of the chunk's rows is written as a product."""
        if isinstance(size, sympy.Add) and len(size.args) == 2:
            factor = sympy.cancel(size / (STOP - START))
            if factor.is_Integer and factor != 1:
                return Code(f"{factor} * {self._rows()}", True)
        return super().size(size)

    def slice_rows(self, tensor: Code, dim: int, first: Code, count: Code, inner: Code) -> Code:
        """Return `tensor[:, first:last]`, or the tensor if these are all rows."""
        if first.text == "0" and not count.is_varying:
            return tensor
        low = "" if first.text == "0" else self._product(first.text, inner)
        last = self._last_row(first, count)
        return Code(f"{tensor}[{':, ' * dim}{low}:{self._product(last, inner)}]", True)

    def _last_row(self, first: Code, count: Code) -> str:
        """Return the end of rows as an expression: `stop`, if the number of rows was computed as `stop - first`."""
        if first.text == "0":
            return count.text
        definition = next((text for text, names in self._variables.items() if names[0] == count), "")
        ending = f" - {first}"
        return definition.removesuffix(ending) if definition.endswith(ending) else f"{first} + {count}"

    @staticmethod
    def _product(text: str, inner: Code) -> str:
        return text if inner.text == "1" else f"({text}) * {inner}" if " " in text else f"{text} * {inner}"
