"""Axis names for shapes in reports, such as `b t d`. No pass uses them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from streamfx.ir.axis_table import Atom, Dim
from streamfx.ir.facts import AxisFacts, Role, Shape
from streamfx.ir.joint import JointGraph, is_tensor

SEQUENCE = {Role.ROWS: "t", Role.KEYS: "s", Role.WHOLE: "T"}
POOL = "dhkfvegmnpqruwxyzijloac"


class AxisNames:
    """A name for each axis: `t` for the sequence (`s` for key positions, `T` for the full sequence) and `b` for the batch.

    Slices and paddings of the sequence are `t'`, `t''`. The other axes are named in order of how many values have them.
    """

    def __init__(self, joint: JointGraph, axes: AxisFacts) -> None:
        self.axes = axes
        self._names = _names(joint, axes)

    def shape(self, shape: Shape, roles: Mapping[int, Role] | None = None) -> str:
        """Format a shape as `[b t d]`; `roles` maps the index of a sequence dimension to its role."""
        return f"[{' '.join(self.dim(dim, (roles or {}).get(i, Role.ROWS)) for i, dim in enumerate(shape))}]"

    def dim(self, dim: Dim, role: Role = Role.ROWS) -> str:
        """Format a dimension as the name of its axis, as `(b t)` if it has several, or as `1`."""
        names = [self._name(atom, role) for atom in self.axes.table.resolve(dim)]
        if len(names) == 1:
            return names[0]
        return f"({' '.join(names)})" if names else "1"

    def _name(self, atom: Atom, role: Role) -> str:
        """Return the name of an axis factor; `t` becomes the letter of its role."""
        name = self._names.get(atom, "?")
        return name.replace("t", SEQUENCE[role]) if self._is_derived(atom) else name

    def _is_derived(self, atom: Atom) -> bool:
        """Return whether an axis factor belongs to the sequence."""
        return self.axes.sequence is not None and atom in self.axes.sequence.members

    def legend(self) -> str:
        """Return a legend such as `t=12 b=2 d=16`: the sizes of axes, and the first rows of axes derived from the sequence."""
        sequence, entries = self.axes.sequence, []
        for atom, name in self._names.items():
            text = f"{name}={self.axes.table.size(atom)}"
            if sequence is not None and atom in sequence.members and atom != sequence.main:
                text += f" from row {sequence.members[atom].offset} of t"
                text += f" in blocks of {sequence.block(atom)}" if atom in sequence.blocks else ""
            entries.append(text)
        return ", ".join(entries)


def _names(joint: JointGraph, axes: AxisFacts) -> dict[Atom, str]:
    """Return a name for each axis factor of a tensor: the sequence, then the batch, then the most common ones."""
    shapes = [axes.shapes[node] for node in (*joint.sources, *joint.nodes) if is_tensor(node)]
    resolved = [[atom for dim in shape for atom in axes.table.resolve(dim)] for shape in shapes]
    members = list(axes.sequence.members) if axes.sequence is not None else []
    names = {atom: "t" + "'" * i for i, atom in enumerate(members)}
    counts = Counter(atom for atoms in resolved for atom in dict.fromkeys(atoms))
    batch = _batch(joint, axes, set(members))
    if batch is not None:
        names[batch] = "b"
    others = [atom for atom, _ in counts.most_common() if atom not in names]
    names.update((atom, _axis_name(i)) for i, atom in enumerate(others))
    return {atom: name for atom, name in names.items() if atom in counts}


def _batch(joint: JointGraph, axes: AxisFacts, members: set[Atom]) -> Atom | None:
    """Find the batch: the axis that no weight has and that most sequence values share."""
    counts: Counter[Atom] = Counter()
    weights: set[Atom] = set()
    for node in (*joint.sources, *joint.nodes):
        if is_tensor(node):
            atoms = {atom for dim in axes.shapes[node] for atom in axes.table.resolve(dim)}
            if atoms & members:
                counts.update(sorted(atoms - members))
            elif node.op == "placeholder":
                weights |= atoms
    return next((atom for atom, _ in counts.most_common() if atom not in weights), None)


def _axis_name(index: int) -> str:
    """Return a letter, followed by a digit if all letters are used: the name of the other axis with this index."""
    repeat, index = divmod(index, len(POOL))
    return POOL[index] + (str(repeat) if repeat else "")
