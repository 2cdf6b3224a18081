"""Masks that depend on data: looked at once per step, for all layers and for both halves.

# NOTE [What is remembered of a mask]
What a mask program is fed are views of values that no loop writes to. They are remembered by where they lie in memory, by their
shapes and by their versions, and kept, so that nothing else can come to lie there; and they are forgotten when a step begins.
Values that are written in the graph, such as an `arange`, are made anew by each half; they are known by how they are made, and
where in them the view lies. So what is remembered is what the mask would come down to, were it made again.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor, fx, nn

from streamfx.runtime.visible import Kind, Piece, pieces_of
from streamfx.torch_private import FakeTensor


class MaskProgram(nn.Module):
    """Makes the mask of a chunk; shared by all loops in which it is the same.

    `literals` say of each input how it is made, if that is written in the graph.
    """

    def __init__(self, body: fx.GraphModule, literals: Sequence[Hashable | None]) -> None:
        super().__init__()
        self.body, self.literals = body, tuple(literals)
        self._known: dict[Hashable, tuple[tuple[Piece, ...], tuple[Any, ...]]] = {}

    def forward(self, *inputs: Any) -> Mask:
        return Mask(self, inputs)

    def __deepcopy__(self, memo: dict[int, Any]) -> MaskProgram:
        """Itself: AOTAutograd compiles a copy of the backward half, which is to find what the forward half has looked at."""
        return self

    def forget(self) -> None:
        self._known.clear()

    def pieces(self, mask: Mask, batch: int, rows: int, keys: int) -> tuple[Piece, ...] | None:
        """What the chunk's rows see, where the mask is the same for all heads; else None."""
        key = self._identity(mask.inputs, (batch, rows, keys))
        if key is not None and key in self._known:
            return self._known[key][0]
        dense = mask.dense()
        if isinstance(dense, FakeTensor) or dense.shape[1] != 1:
            return None
        found = pieces_of(dense.expand(-1, -1, rows, keys)[:, 0], batch)
        if key is not None:
            self._known[key] = found, mask.inputs
        return found

    def _identity(self, inputs: tuple[Any, ...], sizes: tuple[int, ...]) -> Hashable | None:
        """The same only for the same values, as long as these inputs are kept; None where versions are not counted."""
        if any(isinstance(item, Tensor) and (isinstance(item, FakeTensor) or item.is_inference()) for item in inputs):
            return None
        return sizes, tuple(_identity(item, literal) for item, literal in zip(inputs, self.literals, strict=True))


class Mask:
    """The mask of one chunk, made when it is needed; added to scores."""

    def __init__(self, program: MaskProgram, inputs: tuple[Any, ...]) -> None:
        self.program, self.inputs = program, inputs
        self._dense: Tensor | None = None

    def dense(self) -> Tensor:
        """[b h m n], each of b and h all there are or 1."""
        if self._dense is None:
            (dense,) = self.program.body(*self.inputs)
            self._dense = dense[(None,) * (4 - dense.dim())]
        return self._dense

    def pieces(self, rows: int, keys: int, batch: int) -> tuple[Piece, ...]:
        """What the chunk's rows see of its keys."""
        found = self.program.pieces(self, batch, rows, keys) if rows > 0 and keys > 0 else None
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
