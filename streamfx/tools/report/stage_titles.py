"""Combine stage names that differ only in a number."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any


def unnumbered(name: str) -> str:
    """Replace each number in a name by `#`."""
    return re.sub(r"\d+", "#", name)


def group_key(stage: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the key under which stages share a line: everything but a number in the name."""
    keys = ("graph", "kind", "chunk_size", "loops", "saved_bytes", "flops")
    return unnumbered(stage["name"]), tuple(stage["attention"]), *(stage[key] for key in keys)


def joint_name(names: Sequence[str]) -> str:
    """Combine names, e.g. `layers.0` to `layers.3` become `layers.0-3`."""
    if len(names) == 1:
        return names[0]
    first, last = (re.split(r"(\d+)", name) for name in (names[0], names[-1]))
    return "".join(a if a == b else f"{a}-{b}" for a, b in zip(first, last, strict=True))


def names_together(names: Sequence[str]) -> str:
    """List names, and count those that differ only in a number.

    >>> names_together(["layers.0", "layers.1", "head"])
    'layers.0 and 1 like it, head'
    """
    counts = Counter(unnumbered(name) for name in names)
    first_by_kind = {unnumbered(name): name for name in reversed(names)}
    return ", ".join(
        first_by_kind[kind] if count == 1 else f"{first_by_kind[kind]} and {count - 1} like it" for kind, count in counts.items()
    )
