"""A union-find with parity: sets of elements, any two of which are known to be equal or opposite.

The analysis of access roles uses it for dimensions that are either query positions or key positions.
"""

from __future__ import annotations

from collections.abc import Hashable


class ParityUnionFind:
    """Sets of elements that are equal or opposite to each other; `broken` has the roots of sets with a contradiction."""

    def __init__(self) -> None:
        """Start without sets: `_parent` maps an element to (parent, 1 if it is the parent's opposite, else 0)."""
        self._parent: dict[Hashable, tuple[Hashable, int]] = {}
        self.broken: set[Hashable] = set()

    def find(self, element: Hashable) -> tuple[Hashable, int]:
        """Return the root of an element's set, and 1 if the element is the root's opposite, else 0.

        Path compression: all elements on the path then point to the root.
        """
        path, parity = [], 0  # elements on the path, each with its parity relative to `element`
        while (parent_and_parity := self._parent.get(element, (element, 0)))[0] != element:
            path.append((element, parity))
            parity ^= parent_and_parity[1]
            element = parent_and_parity[0]
        for visited, parity_to_parent in path:
            self._parent[visited] = (element, parity ^ parity_to_parent)
        return element, parity

    def relate(self, left: Hashable, right: Hashable, opposite: bool) -> None:
        """Record that two elements are opposite, or equal, and merge their sets.

        If that contradicts earlier relations, mark the set as broken.
        """
        (left_root, left_parity), (right_root, right_parity) = self.find(left), self.find(right)
        if left_root == right_root:
            if left_parity ^ right_parity != opposite:
                self.broken.add(left_root)
            return
        self._parent[left_root] = (right_root, left_parity ^ right_parity ^ opposite)
        if left_root in self.broken:
            self.broken.add(right_root)
