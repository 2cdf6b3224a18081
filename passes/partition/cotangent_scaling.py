"""Insert the ones that replace a cotangent scale in the forward graph, and the products that scale gradients.

A *cotangent scale* is the number, or number per sequence of the batch, in which a gradient is linear: the gradient for a scale
of ones is computed in forward and multiplied by the scale later. The new operators are inserted after the analyses have run,
so this module also records their axes (an *axis label*, here an integer, for each dimension; none for size 1) and storage
classes. An *alignment* maps the scale's dimensions to the gradient's, some of which may have to be split: b -> (b t).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from streamfx.ir.facts import AccessFacts, AxisFacts, DimAxes, Facts, Role, StorageClass
from streamfx.ir.signature import LabelShape, Signature
from streamfx.ir.writer import GraphWriter, size_arguments
from streamfx.node_meta import VALUE
from streamfx.passes.analysis.alignment import Alignment, align, group_scale_dims
from streamfx.passes.analysis.homogeneity import RowMask

aten = torch.ops.aten


class Scaling:
    """Inserts operators into a joint graph, and records their facts in `axes` and `access` (and `new_nodes`)."""

    def __init__(self, facts: Facts) -> None:
        """Copy the facts that this object changes: other loss stages that are tried use the originals."""
        self.axes: AxisFacts = replace(
            facts.axes,
            shapes=dict(facts.axes.shapes),
            results=dict(facts.axes.results),
            signatures=dict(facts.axes.signatures),
            labels=dict(facts.axes.labels),
        )
        self.access: AccessFacts = replace(
            facts.access, roles=dict(facts.access.roles), storage_classes=dict(facts.access.storage_classes)
        )
        self.writer = GraphWriter(facts.joint.graph)
        self.new_nodes: list[fx.Node] = []

    def ones_like(self, scale: fx.Node, before: fx.Node) -> list[fx.Node]:
        """Insert ones of the scale's shape and dtype before `before`. Return the new nodes: dynamic sizes, then the ones."""
        self.new_nodes = []
        value = scale.meta[VALUE]
        sizes = self._sizes(scale, self.writer.move_before(before))
        ones = self.writer.call(aten.full.default, sizes, 1.0, dtype=value.dtype, device=value.device)
        self._record_facts(ones, (), self._labels(self.axes_by_dim(scale)), self.axes_by_dim(scale))
        return self.new_nodes

    def product(self, gradient: fx.Node, scale: fx.Node, row_mask: RowMask | None = None) -> list[fx.Node]:
        """Emit `gradient * scale` after the gradient, in the gradient's dtype and shape; return the new nodes, the product last.

        The scale is broadcast: for a gradient of shape (b * t, c) and a scale of shape (b, 1), the gradient is reshaped to
        (b, t, c) and back. `row_mask`: the entries of the scale that contribute to the gradient; others become 0.
        """
        self.new_nodes = []
        self.writer.move_before(gradient.next)
        dtype = gradient.meta[VALUE].dtype
        alignment = align(self.axes_by_dim(scale), self.axes_by_dim(gradient))
        assert alignment is not None
        reshaped = self._emit_split(gradient, scale, alignment)
        axes = alignment.axes_by_dim
        labels = self._labels(axes)
        factor = self._emit_factor(scale, alignment, row_mask)
        factor_labels = tuple(
            label if scale_dim is not None else () for label, scale_dim in zip(labels, alignment.scale_dims, strict=True)
        )
        scaled = self.writer.call(aten.mul.Tensor, reshaped, factor)
        self._record_facts(scaled, (labels, factor_labels if self.axes_by_dim(factor) else ()), labels, axes)
        if scaled.meta[VALUE].dtype != dtype:
            scaled = self.writer.call(aten._to_copy.default, scaled, dtype=dtype)
            self._record_facts(scaled, (labels,), labels, axes)
        if alignment.is_split:
            restored = self.writer.call(aten.reshape.default, scaled, self._original_sizes(gradient, alignment))
            self._record_facts(restored, (labels,), self._grouped_labels(alignment), axes)
        return self.new_nodes

    def _emit_split(self, gradient: fx.Node, scale: fx.Node, alignment: Alignment) -> fx.Node:
        """Reshape the gradient so that the scale's dimensions are separate from all others, as (b * t, c) -> (b, t, c).

        Return the reshaped node; the gradient itself if that is not needed.
        """
        if not alignment.is_split:
            return gradient
        gradient_sizes, scale_sizes = self._sizes(gradient), self._sizes(scale)
        sizes: list[Any] = []
        # each dimension of the gradient becomes one or several; of these, at most one is not a dimension of the scale (None)
        for gradient_dim, scale_dims in enumerate(group_scale_dims(alignment.scale_dims, alignment.dims)):
            rest = gradient_sizes[gradient_dim] if len(scale_dims) == 1 else -1
            sizes += [rest if scale_dim is None else scale_sizes[scale_dim] for scale_dim in scale_dims]
        split = self.writer.call(aten.reshape.default, gradient, sizes)
        axes = alignment.axes_by_dim
        return self._record_facts(split, (self._grouped_labels(alignment),), self._labels(axes), axes)

    def _original_sizes(self, gradient: fx.Node, alignment: Alignment) -> list[Any]:
        """Return the arguments of the reshape that restores the gradient's shape; -1 for the dimension that was split."""
        return [-1 if len(dims) > 1 else size for size, dims in zip(self._sizes(gradient), alignment.dims, strict=True)]

    def _emit_factor(self, scale: fx.Node, alignment: Alignment, row_mask: RowMask | None) -> fx.Node:
        """Return the scale reshaped to broadcast over the gradient: for a gradient (b, t, c), a scale (b, 1) -> (b, 1, 1).

        Entries of the scale that `row_mask` excludes become 0. A scalar keeps its shape.
        """
        axes = self.axes_by_dim(scale)
        if dims_of_size_one := [i for i, dim in enumerate(axes) if not dim]:
            squeezed_axes = tuple(dim for dim in axes if dim)
            squeezed_labels = self._labels(squeezed_axes)
            remaining = iter(squeezed_labels)
            operand_labels = tuple(next(remaining) if dim else () for dim in axes)
            squeezed = self.writer.call(aten.squeeze.dims, scale, dims_of_size_one)
            scale = self._record_facts(squeezed, (operand_labels,), squeezed_labels, squeezed_axes)
            axes = squeezed_axes
        if row_mask is not None:
            labels = self._labels(axes)
            cleared = self.writer.call(aten.masked_fill.Scalar, scale, self._emit_mask_of_unused(row_mask, axes), 0)
            scale = self._record_facts(cleared, (labels, labels), labels, axes)
        for i, scale_dim in enumerate(alignment.scale_dims) if axes else ():
            if scale_dim is None:
                wide_axes = (*axes[:i], (), *axes[i:])
                labels = self._labels(wide_axes)
                operand_labels = (*labels[:i], *labels[i + 1 :])
                wide = self.writer.call(aten.unsqueeze.default, scale, i)
                scale = self._record_facts(wide, (operand_labels,), labels, wide_axes)
                axes = wide_axes
        return scale

    def _emit_mask_of_unused(self, row_mask: RowMask, scale_axes: DimAxes) -> fx.Node:
        """Emit a mask of the scale's shape: True for entries (e.g. sequences of the batch) that contribute to no gradient.

        An entry contributes if the condition equals `row_mask.when` at any of its positions. So reduce the condition over the
        dimensions that the scale lacks: by `any` if `when` is True (then negate the result), else by `all`.
        """
        mask = row_mask.condition
        axes = self.axes_by_dim(mask)
        if reduced_dims := [i for i, dim in enumerate(axes) if dim not in scale_axes]:
            labels = self._labels(axes)
            kept_labels = tuple(label for label, dim in zip(labels, axes, strict=True) if dim in scale_axes)
            mask = self.writer.call(aten.any.dims if row_mask.when else aten.all.dims, mask, reduced_dims)
            self._record_facts(mask, operand_labels=(labels,), result_labels=kept_labels, axes_of_label=axes)
            self.access.roles[mask] = dict.fromkeys(self.access.roles[mask], Role.WHOLE)  # type: ignore[index]
            self.access.storage_classes[mask] = (StorageClass.OUTSIDE,)  # type: ignore[index]
        if row_mask.when:
            labels = self._labels(scale_axes)
            mask = self.writer.call(aten.logical_not.default, mask)
            self._record_facts(mask, operand_labels=(labels,), result_labels=labels, axes_of_label=scale_axes)
        return mask

    def axes_by_dim(self, node: fx.Node) -> DimAxes:
        """Return, for each dimension of a value, the axes whose product it is: ((b, t), (d,)); `()` if its size is 1."""
        return tuple(self.axes.table.resolve(dim) for dim in self.axes.shapes[node])

    def _sizes(self, node: fx.Node, writer: GraphWriter | None = None) -> list[Any]:
        """Return the sizes of a value as arguments of an operator: integers, or nodes (with facts) for dynamic sizes.

        Nodes are inserted where `writer` (this object's by default) inserts.
        """
        sizes = size_arguments(node, writer or self.writer)
        for size in sizes:
            if isinstance(size, fx.Node):
                self.access.storage_classes[size] = (StorageClass.OUTSIDE,)  # type: ignore[index]
                self.new_nodes.append(size)
        return sizes

    def _labels(self, axes: DimAxes) -> LabelShape:
        """Return the axis labels of each dimension: its index, or `()` if its size is 1, as ((0,), (), (2,))."""
        return tuple((i,) if dim else () for i, dim in enumerate(axes))

    def _grouped_labels(self, alignment: Alignment) -> LabelShape:
        """Return the labels of the split dimensions, by the gradient's original dimensions: ((0, 1), (2,)) for (b t) c."""
        labels = iter(self._labels(alignment.axes_by_dim))
        return tuple(tuple(label for _ in dims for label in next(labels)) for dims in alignment.dims)

    def _record_facts(
        self, node: fx.Node, operand_labels: Sequence[LabelShape], result_labels: LabelShape, axes_of_label: DimAxes
    ) -> fx.Node:
        """Record the facts of a new node, add it to `new_nodes`, and return it.

        The labels of its operands and result become its axis rule; `axes_of_label[i]` has the axes of label i. It is computed
        chunk by chunk if one of them is the sequence, otherwise once outside loops.
        """
        result_axes = tuple(tuple(factor for label in dim for factor in axes_of_label[label]) for dim in result_labels)
        self.axes.shapes[node], self.axes.results[node] = result_axes, (result_axes,)  # type: ignore[index]
        self.axes.signatures[node] = Signature(tuple(operand_labels), (result_labels,))  # type: ignore[index]
        self.axes.labels[node] = dict(enumerate(axes_of_label))  # type: ignore[index]
        rows = [label for label, dim in enumerate(axes_of_label) if self.axes.sequence_factor(dim) is not None]
        self.access.roles[node] = dict.fromkeys(rows, Role.ROWS)  # type: ignore[index]
        self.access.storage_classes[node] = (StorageClass.ROWS if rows else StorageClass.OUTSIDE,)  # type: ignore[index]
        self.new_nodes.append(node)
        return node
