"""Axis names for shapes in reports, such as `b t d`. No pass uses them.

A dimension is a product of axis factors (factors); each factor gets a name. *Derived axes* hold rows of the sequence, from some
row on: slices and paddings of it. A loop reads an axis of the sequence by its *role*: its own rows, key positions, or all rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from streamfx.ir.axis_table import AxisFactor, Dim
from streamfx.ir.facts import AxisFacts, DimAxes, Role
from streamfx.ir.joint import JointGraph, is_tensor

SEQUENCE = {Role.ROWS: "t", Role.KEYS: "s", Role.WHOLE: "T"}
POOL = "dhkfvegmnpqruwxyzijloac"  # names of all other axes, in order: the most frequent axis is `d`


class AxisNames:
    """A name for each axis: `t` for the sequence (`s` for key positions, `T` for the full sequence) and `b` for the batch.

    Slices and paddings of the sequence are `t'`, `t''`. The other axes are named in order of how many values have them.
    """

    def __init__(self, joint: JointGraph, axes: AxisFacts) -> None:
        self.axes = axes
        self._names = _names(joint, axes)

    def shape(self, shape: DimAxes, roles: Mapping[int, Role] | None = None) -> str:
        """Format a shape as `[b t d]`; `roles` maps the index of a sequence dimension to its role (default: `t`, own rows)."""
        roles = roles or {}
        return f"[{' '.join(self.dim(dim, roles.get(dim_index, Role.ROWS)) for dim_index, dim in enumerate(shape))}]"

    def dim(self, dim: Dim, role: Role = Role.ROWS) -> str:
        """Format a dimension as the name of its axis: `t`. With several axes, as `(b t)`; with none (size one), as `1`."""
        names = [self._name(factor, role) for factor in self.axes.table.resolve(dim)]
        if len(names) == 1:
            return names[0]
        return f"({' '.join(names)})" if names else "1"

    def _name(self, factor: AxisFactor, role: Role) -> str:
        """Return the name of an axis factor; an axis of the sequence is `t`, `s` or `T`, by its role."""
        name = self._names.get(factor, "?")
        return name.replace("t", SEQUENCE[role]) if self._is_derived(factor) else name

    def _is_derived(self, factor: AxisFactor) -> bool:
        """Return whether an axis factor is the sequence, or derived from it."""
        return self.axes.sequence is not None and factor in self.axes.sequence.members

    def legend(self) -> str:
        """Return a legend such as `t=12, t'=10 from row 2 of t, b=2, d=16`: each axis with its size.

        An axis derived from the sequence also gets its first row in the sequence, and its rows per block if it has blocks.
        """
        sequence, entries = self.axes.sequence, []
        for factor, name in self._names.items():
            text = f"{name}={self.axes.table.size(factor)}"
            if sequence is not None and factor in sequence.members and factor != sequence.main:
                text += f" from row {sequence.members[factor].offset} of t"
                text += f" in blocks of {sequence.block(factor)}" if factor in sequence.blocks else ""
            entries.append(text)
        return ", ".join(entries)


def _names(joint: JointGraph, axes: AxisFacts) -> dict[AxisFactor, str]:
    """Return a name for each axis factor that a tensor has.

    `t`, `t'`, ... for the axes of the sequence, `b` for the batch; all others by how many tensors have them, from `POOL`.
    """
    shapes = [axes.shapes[node] for node in (*joint.sources, *joint.nodes) if is_tensor(node)]
    factors_of_shapes = [[factor for dim in shape for factor in axes.table.resolve(dim)] for shape in shapes]
    sequence_factors = list(axes.sequence.members) if axes.sequence is not None else []
    names = {factor: "t" + "'" * i for i, factor in enumerate(sequence_factors)}
    num_tensors = Counter(factor for factors in factors_of_shapes for factor in dict.fromkeys(factors))
    batch = _batch(joint, axes, set(sequence_factors))
    if batch is not None:
        names[batch] = "b"
    others = [factor for factor, _ in num_tensors.most_common() if factor not in names]
    names.update((factor, _pool_name(rank)) for rank, factor in enumerate(others))
    return {factor: name for factor, name in names.items() if factor in num_tensors}


def _batch(joint: JointGraph, axes: AxisFacts, sequence_factors: set[AxisFactor]) -> AxisFactor | None:
    """Return the batch axis: among the axes that no weight has, the axis that most values with rows of the sequence have.

    An input without a sequence axis counts as a weight. None if there is no such axis.
    """
    num_values: Counter[AxisFactor] = Counter()
    weight_factors: set[AxisFactor] = set()
    for node in (*joint.sources, *joint.nodes):
        if is_tensor(node):
            factors = {factor for dim in axes.shapes[node] for factor in axes.table.resolve(dim)}
            if factors & sequence_factors:
                num_values.update(sorted(factors - sequence_factors))
            elif node.op == "placeholder":
                weight_factors |= factors
    return next((factor for factor, _ in num_values.most_common() if factor not in weight_factors), None)


def _pool_name(rank: int) -> str:
    """Return the name of the axis with this rank among the other axes: 0 -> `d`, 1 -> `h`, ...; 23 -> `d1`, after all labels."""
    repeat, label_index = divmod(rank, len(POOL))
    return POOL[label_index] + (str(repeat) if repeat else "")
