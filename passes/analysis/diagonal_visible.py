"""Does each row see its own key? Asked of masks before it is known which operators stream."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from streamfx.ir.facts import Facts
from streamfx.ir.ranges import Range
from streamfx.passes.analysis.access_roles import AccessRoles
from streamfx.passes.analysis.mask_facts import Masks


def own_keys(facts: Facts) -> Callable[[fx.Node], bool]:
    """Tells of a mask whether what it adds to the score of each row's own key is proven to be a small number, or a weight."""
    masks = Masks(facts.joint, facts.axes, AccessRoles().apply(facts).demand)

    def are_seen(mask: fx.Node) -> bool:
        own = masks.of(mask).at(0)
        return isinstance(own, Range) and own.is_finite and own.is_counted

    return are_seen
