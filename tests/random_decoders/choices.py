"""Choices that are drawn by their names.

    Choices("7")("mask", ("arange", "tril"))  ->  the same in every process, whatever else is drawn, before or after

A new field does not change draws of other fields. A new value changes a draw only if it is the value drawn: the value with the
largest digest is taken, and the digest of a value does not depend on other values.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Choices:
    """A source of choices; its name precedes the name of each choice."""

    name: str

    def __call__(self, name: str, values: Iterable[T]) -> T:
        return max(values, key=lambda value: self._digest(f"{name}/{value!r}"))

    def chance(self, name: str, share: float) -> bool:
        return self._digest(name) < share * 2**64

    def within(self, name: str) -> Choices:
        return Choices(f"{self.name}/{name}")

    def _digest(self, name: str) -> int:
        return int.from_bytes(blake2b(f"{self.name}/{name}".encode(), digest_size=8).digest(), "big")
