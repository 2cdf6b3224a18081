"""Check whether each query position sees its own key; used on masks before access roles are final."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from streamfx.ir.facts import Facts
from streamfx.ir.ranges import Range
from streamfx.passes.analysis.access_roles import AccessRoles
from streamfx.passes.analysis.mask_facts import Masks


def find_diagonal_keys(facts: Facts) -> Callable[[fx.Node], bool]:
    """Return a predicate: whether a mask provably adds a small number, or a weight, to the score of each row's own key."""
    masks = Masks(facts.joint, facts.axes, AccessRoles().apply(facts).access)

    def is_visible(mask: fx.Node) -> bool:
        diagonal = masks.of(mask).at(0)
        return isinstance(diagonal, Range) and diagonal.is_finite and diagonal.is_counted

    return is_visible
