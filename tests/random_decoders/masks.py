"""Masks, scores and parts of attention, as expressions and lines of attention.txt."""

from tests.random_decoders.tables import expressions, tables

_TABLES = tables("attention.txt")
ROTARY, GROUPS, CORES = (_TABLES.pop(name) for name in ("rotary", "groups", "cores"))
_TEXT = {name: expressions(table) for name, table in _TABLES.items()}
BENT, FILLS, HIDING, TABLES, VISIBLE = (_TEXT[name] for name in ("bent", "fills", "hiding", "tables", "visible"))
POSITIONS, APART, RELATIONS, TOGETHER = (_TEXT[name] for name in ("positions", "apart", "relations", "together"))
SINKS = {"none": 0.0, "behind": 0.0, "front": 0.0, "low": 20.0, "lowest": 40.0, "high": -40.0}  # subtracted from initial sinks


def arithmetic(positions: str, apart: str, relation: str, together: str) -> tuple[str, ...]:
    """The lines that compute `seen` [t t] by index arithmetic."""
    seen = RELATIONS[relation].format(d=f"({APART[apart]})")
    return (f"n = {POSITIONS[positions]}", "i, j = n[:, None], n[None, :]", f"seen = {TOGETHER[together].format(seen=seen)}")
