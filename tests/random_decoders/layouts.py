"""How the dimensions of a program's tensors are ordered, as fragments of Python.

Every core of attention sees q, k, v as [.., H, T, E], scores as [.., H, T, T]; a layout knows how to get there from x.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """`x` is [sizes, D], and ids are [sizes]; `time` is the dimension of the sequence in both."""

    sizes: str
    time: int
    into_heads: str
    out_of_heads: str
    over_keys: str
    over_rows: str
    is_folded: bool = False

    def heads(self, x: str, heads: int, size: int) -> str:
        return f"{x}.view({self.sizes}, {heads}, {size}){self.into_heads}"

    def merged(self, y: str, width: int) -> str:
        return f"{y}{self.out_of_heads}.reshape({self.sizes}, {width})"

    def keys(self, mask: str, heads: int) -> str:
        """[sizes] as something to compare scores with, along their keys."""
        return f"{mask}{self.over_keys.format(heads=heads)}"

    def rows(self, mask: str, heads: int) -> str:
        return f"{mask}{self.over_rows.format(heads=heads)}"

    def per_head(self, values: str) -> str:
        """[H] beside scores."""
        return f"{values}.repeat(b)[:, None, None]" if self.is_folded else f"{values}[:, None, None]"

    def pair_per_head(self, values: str) -> str:
        """[H, T, T] beside scores."""
        return f"{values}.repeat(b, 1, 1)" if self.is_folded else values

    def cut(self, x: str, rows: str) -> str:
        """Rows of the sequence."""
        return f"{x}[{':, ' * self.time}{rows}]"


LAYOUTS = {
    "batch first": Layout("b, t", 1, ".transpose(1, 2)", ".transpose(1, 2)", "[:, None, None, :]", "[:, None, :, None]"),
    "time first": Layout(
        "t, b", 0, ".permute(1, 2, 0, 3)", ".permute(2, 0, 1, 3)", ".t()[:, None, None, :]", ".t()[:, None, :, None]"
    ),
    "unbatched": Layout("t", 0, ".transpose(0, 1)", ".transpose(0, 1)", "", "[:, None]"),
    "folded": Layout(
        "b, t",
        1,
        ".transpose(1, 2)",
        ".transpose(1, 2)",
        ".repeat_interleave({heads}, 0)[:, None, :]",
        ".repeat_interleave({heads}, 0)[:, :, None]",
        is_folded=True,
    ),
}
