"""Insert the ones that replace a cotangent scale in the forward graph, and the products that scale gradients.

These operators are inserted after the analyses have run, so this module also records their axes and storage classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from streamfx.ir.facts import AccessFacts, AxisFacts, Facts, Role, Shape, StorageClass
from streamfx.ir.signature import LetterShape, Signature
from streamfx.ir.writer import GraphWriter, size_arguments
from streamfx.node_meta import VALUE
from streamfx.passes.analysis.alignment import Alignment, align, group_scale_dims
from streamfx.passes.analysis.homogeneity import RowMask

aten = torch.ops.aten


class Scaling:
    """Inserts operators into a joint graph, and records their facts in `axes` and `access`."""

    def __init__(self, facts: Facts) -> None:
        """Copy the facts that this object changes: other loss stages that are tried use the originals."""
        self.axes: AxisFacts = replace(
            facts.axes,
            shapes=dict(facts.axes.shapes),
            results=dict(facts.axes.results),
            signatures=dict(facts.axes.signatures),
            letters=dict(facts.axes.letters),
        )
        self.access: AccessFacts = replace(
            facts.access, roles=dict(facts.access.roles), storage_classes=dict(facts.access.storage_classes)
        )
        self.writer = GraphWriter(facts.joint.graph)
        self.new_nodes: list[fx.Node] = []

    def ones_like(self, scale: fx.Node, before: fx.Node) -> list[fx.Node]:
        """Insert ones of the scale's shape before `before`; return the new nodes, the ones last. They depend on sizes alone."""
        self.new_nodes, value = [], scale.meta[VALUE]
        sizes = self._sizes(scale, self.writer.before(before))
        ones = self.writer.call(aten.full.default, sizes, 1.0, dtype=value.dtype, device=value.device)
        self._record_facts(ones, (), self._letters(self.shape(scale)), self.shape(scale))
        return self.new_nodes

    def product(self, gradient: fx.Node, scale: fx.Node, row_mask: RowMask | None = None) -> list[fx.Node]:
        """Multiply a gradient by its scale, in the gradient's dtype; return the new nodes, the product last."""
        self.new_nodes = []
        self.writer.before(gradient.next)
        dtype, alignment = gradient.meta[VALUE].dtype, align(self.shape(scale), self.shape(gradient))
        assert alignment is not None
        reshaped, letters = self._split(gradient, scale, alignment), self._letters(alignment.shape)
        factor = self._factor(scale, alignment, row_mask)
        factor_labels = tuple(
            label if scale_dim is not None else () for label, scale_dim in zip(letters, alignment.scale_dims, strict=True)
        )
        scaled = self.writer.call(aten.mul.Tensor, reshaped, factor)
        self._record_facts(scaled, (letters, factor_labels if self.shape(factor) else ()), letters, alignment.shape)
        if scaled.meta[VALUE].dtype != dtype:
            scaled = self.writer.call(aten._to_copy.default, scaled, dtype=dtype)
            self._record_facts(scaled, (letters,), letters, alignment.shape)
        if alignment.is_split:
            restored = self.writer.call(aten.reshape.default, scaled, self._original_sizes(gradient, alignment))
            self._record_facts(restored, (letters,), self._grouped(alignment), alignment.shape)
        return self.new_nodes

    def _split(self, gradient: fx.Node, scale: fx.Node, alignment: Alignment) -> fx.Node:
        """Reshape the gradient so that the scale's dimensions are separate from all others."""
        if not alignment.is_split:
            return gradient
        gradient_sizes, scale_sizes = self._sizes(gradient), self._sizes(scale)
        groups = group_scale_dims(alignment.scale_dims, alignment.dims)
        sizes = [
            scale_sizes[scale_dim] if scale_dim is not None else gradient_sizes[i] if len(scale_dims) == 1 else -1
            for i, scale_dims in enumerate(groups)
            for scale_dim in scale_dims
        ]
        split = self.writer.call(aten.reshape.default, gradient, sizes)
        return self._record_facts(split, (self._grouped(alignment),), self._letters(alignment.shape), alignment.shape)

    def _original_sizes(self, gradient: fx.Node, alignment: Alignment) -> list[Any]:
        """Return the sizes that restore the gradient's shape; -1 for the dimension that was split."""
        return [-1 if len(dims) > 1 else size for size, dims in zip(self._sizes(gradient), alignment.dims, strict=True)]

    def _factor(self, scale: fx.Node, alignment: Alignment, row_mask: RowMask | None) -> fx.Node:
        """Return the scale with the gradient's dimensions, of size one if the scale lacks them; a scalar is not changed."""
        shape = self.shape(scale)
        if singles := [i for i, dim in enumerate(shape) if not dim]:
            reduced = tuple(dim for dim in shape if dim)
            remaining = iter(self._letters(reduced))
            operand = tuple(next(remaining) if dim else () for dim in shape)
            scale = self._record_facts(
                self.writer.call(aten.squeeze.dims, scale, singles), (operand,), self._letters(reduced), reduced
            )
            shape = reduced
        if row_mask is not None:
            letters = self._letters(shape)
            cleared = self.writer.call(aten.masked_fill.Scalar, scale, self._unused_rows_mask(row_mask, shape), 0)
            scale = self._record_facts(cleared, (letters, letters), letters, shape)
        for i, scale_dim in enumerate(alignment.scale_dims) if shape else ():
            if scale_dim is None:
                wide = (*shape[:i], (), *shape[i:])
                letters = self._letters(wide)
                operand = (*letters[:i], *letters[i + 1 :])
                scale = self._record_facts(self.writer.call(aten.unsqueeze.default, scale, i), (operand,), letters, wide)
                shape = wide
        return scale

    def _unused_rows_mask(self, row_mask: RowMask, scale_shape: Shape) -> fx.Node:
        """Return the mask of the scale's rows that contribute to no gradient."""
        condition, shape = row_mask.condition, self.shape(row_mask.condition)
        other_dims = [i for i, dim in enumerate(shape) if dim not in scale_shape]
        letters = self._letters(shape)
        kept = tuple(letter for letter, dim in zip(letters, shape, strict=True) if dim in scale_shape)
        reduce = aten.any.dims if row_mask.when else aten.all.dims
        mask = condition
        if other_dims:
            mask = self._record_facts(self.writer.call(reduce, condition, other_dims), (letters,), kept, shape)
            self.access.roles[mask] = dict.fromkeys(self.access.roles[mask], Role.WHOLE)  # type: ignore[index]
            self.access.storage_classes[mask] = (StorageClass.OUTSIDE,)  # type: ignore[index]
        if row_mask.when:
            scale_letters = self._letters(scale_shape)
            mask = self._record_facts(
                self.writer.call(aten.logical_not.default, mask), (scale_letters,), scale_letters, scale_shape
            )
        return mask

    def shape(self, node: fx.Node) -> Shape:
        """Return the resolved axes of each dimension of a value."""
        return tuple(self.axes.table.resolve(dim) for dim in self.axes.shapes[node])

    def _sizes(self, node: fx.Node, writer: GraphWriter | None = None) -> list[Any]:
        """Return the sizes of a value as arguments."""
        sizes = size_arguments(node, writer or self.writer)
        for size in sizes:
            if isinstance(size, fx.Node):
                self.access.storage_classes[size] = (StorageClass.OUTSIDE,)  # type: ignore[index]
                self.new_nodes.append(size)
        return sizes

    def _letters(self, shape: Shape) -> LetterShape:
        """Assign a label to each dimension whose size is not one."""
        return tuple((i,) if dim else () for i, dim in enumerate(shape))

    def _grouped(self, alignment: Alignment) -> LetterShape:
        """Return the labels of the aligned dimensions, grouped by the gradient's original dimensions."""
        letters = iter(self._letters(alignment.shape))
        return tuple(tuple(letter for _ in dims for letter in next(letters)) for dims in alignment.dims)

    def _record_facts(self, node: fx.Node, operands: Sequence[LetterShape], result: LetterShape, letters: Shape) -> fx.Node:
        """Record the facts of a new node: its axis labels, and that it is chunked along the sequence."""
        shape = tuple(tuple(atom for letter in dim for atom in letters[letter]) for dim in result)
        self.axes.shapes[node], self.axes.results[node] = shape, (shape,)  # type: ignore[index]
        self.axes.signatures[node] = Signature(tuple(operands), (result,))  # type: ignore[index]
        self.axes.letters[node] = dict(enumerate(letters))  # type: ignore[index]
        rows = [letter for letter, dim in enumerate(letters) if self.axes.sequence_atom(dim) is not None]
        self.access.roles[node] = dict.fromkeys(rows, Role.ROWS)  # type: ignore[index]
        self.access.storage_classes[node] = (StorageClass.ROWS if rows else StorageClass.OUTSIDE,)  # type: ignore[index]
        self.new_nodes.append(node)
        return node
