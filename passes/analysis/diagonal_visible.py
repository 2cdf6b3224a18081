"""Check whether each query position provably sees its own key, so that a softmax over its keys is not empty.

The rewrite `split_concat_kv` uses it before access roles (rows, keys) are final.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from streamfx.ir.facts import Facts
from streamfx.ir.ranges import Range
from streamfx.passes.analysis.access_roles import AccessRoles
from streamfx.passes.analysis.mask_facts import Masks


def find_diagonal_keys(facts: Facts) -> Callable[[fx.Node], bool]:
    """Return a predicate on additive masks: whether each row's own key gets a small number, or a weight, added to its score.

    Such a key is visible: the number is finite, and small enough that sums with it keep their digits.
    """
    masks = Masks(facts.joint, facts.axes, AccessRoles().apply(facts).access)

    def is_visible(mask: fx.Node) -> bool:
        diagonal = masks.of(mask).at(0)  # what is known for key position - query position = 0
        return isinstance(diagonal, Range) and diagonal.is_finite and diagonal.is_counted

    return is_visible
