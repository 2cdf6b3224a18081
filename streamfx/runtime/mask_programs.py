"""Masks that depend on data: looked at once per step, for all layers and for both halves.

# NOTE [What is remembered of a mask]
What a mask program is fed are views of values that no loop writes to. A step remembers them (`Looks`) by where they lie in
memory, by their shapes and by their versions, and keeps that memory, so that nothing else can come to lie there. Values that are
written in the graph, such as an `arange`, are made anew by each half; they are known by how they are made, and where in them the
view lies. So what is remembered is what the mask would come down to, were it made again. Each forward half begins with nothing,
and its backward half goes on with what that has found: other steps, in this thread or in others, have looks of their own.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, fx, nn

from streamfx.runtime.visible import Kind, Piece, pieces_of
from streamfx.torch_private import FakeTensor


class Looks:
    """What a step has found of its masks: pieces by mask program and inputs, and the memory that the inputs lie in."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[tuple[Piece, ...], list[Any]]] = {}

    def find(self, key: Hashable) -> tuple[Piece, ...] | None:
        found = self._known.get(key)
        return found[0] if found is not None else None

    def keep(self, key: Hashable, pieces: tuple[Piece, ...], inputs: Sequence[Any]) -> None:
        """Remember pieces; of tensors the memory is kept, not the tensor, which may be a view of what these looks hang on."""
        self._known[key] = pieces, [item.untyped_storage() for item in inputs if isinstance(item, Tensor)]


_looks: ContextVar[Looks | None] = ContextVar("streamfx_looks", default=None)


@contextmanager
def looking(looks: Looks) -> Iterator[Looks]:
    """The half of a step that runs inside of it remembers there what it finds."""
    token = _looks.set(looks)
    try:
        yield looks
    finally:
        _looks.reset(token)


class MaskProgram(nn.Module):
    """Makes the mask of a chunk; shared by all loops in which it is the same, and by all runs: it holds nothing of any.

    `literals` say of each input how it is made, if that is written in the graph.
    """

    def __init__(self, body: fx.GraphModule, literals: Sequence[Hashable | None]) -> None:
        super().__init__()
        self.body, self.literals = body, tuple(literals)

    def forward(self, *inputs: Any) -> Mask:
        return Mask(self, inputs, _looks.get() or Looks())

    def __deepcopy__(self, memo: dict[int, Any]) -> MaskProgram:
        """Itself: AOTAutograd compiles a copy of the backward half, which is to find what the forward half has found."""
        return self

    def pieces(self, mask: Mask, batch: int, rows: int, keys: int, finite_hides: bool) -> tuple[Piece, ...] | None:
        """What the chunk's rows see, where the mask is the same for all heads; else None."""
        key = self._identity(mask.inputs, (batch, rows, keys, finite_hides))
        known = mask.looks.find(key) if key is not None else None
        if known is not None:
            return known
        dense = mask.dense()
        if isinstance(dense, FakeTensor) or dense.shape[1] != 1:
            return None
        found = pieces_of(dense.expand(-1, -1, rows, keys)[:, 0], batch, finite_hides)
        if key is not None:
            mask.looks.keep(key, found, mask.inputs)
        return found

    def _identity(self, inputs: tuple[Any, ...], sizes: tuple[int, ...]) -> Hashable | None:
        """The same only for the same values, as long as these inputs are kept; None where versions are not counted."""
        if any(isinstance(item, Tensor) and (isinstance(item, FakeTensor) or item.is_inference()) for item in inputs):
            return None
        return id(self), sizes, tuple(_identity(item, literal) for item, literal in zip(inputs, self.literals, strict=True))


class Mask:
    """The mask of one chunk, made when it is needed; added to scores."""

    def __init__(self, program: MaskProgram, inputs: tuple[Any, ...], looks: Looks) -> None:
        self.program, self.inputs, self.looks = program, inputs, looks
        self._dense: Tensor | None = None

    def dense(self) -> Tensor:
        """[b h m n], each of b and h all there are or 1."""
        if self._dense is None:
            (dense,) = self.program.body(*self.inputs)
            self._dense = dense[(None,) * (4 - dense.dim())]
        return self._dense

    def pieces(self, rows: int, keys: int, batch: int, finite_hides: bool) -> tuple[Piece, ...]:
        """What the chunk's rows see of its keys."""
        found = self.program.pieces(self, batch, rows, keys, finite_hides) if rows > 0 and keys > 0 else None
        if found is None:
            return (Piece(Kind.MIXED, (0, rows), (0, keys), (0, batch)),)
        if all(piece.kind is not Kind.MIXED for piece in found):
            self._dense = None
        return found


def _identity(item: Any, literal: Hashable | None) -> Hashable:
    if not isinstance(item, Tensor):
        return item
    lies = (item.data_ptr(), item._version) if literal is None else (literal, item.storage_offset())
    return *lies, item.dtype, tuple(item.shape), item.stride(), item.device
