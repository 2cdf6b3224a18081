"""A weight's gradient, added to a float32 total: in place against a product that is added."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.gpu import Finding, Place
from benchmarks.gpu.measures import distance, seconds
from streamfx.runtime import sums

REAL = (
    (4096, 12288, 4096),
    (4096, 151936, 2048),
    (4096, 4096, 4096),
)  # Qwen3-8B's MLP, head, attention: weight, and rows of a chunk
SMALL = ((32, 48, 16),)


def accumulation(place: Place) -> Iterator[Finding]:
    """Time of both, and the total's distance to float64's beside that of a product in float32."""
    for m, n, rows in SMALL if place.small else REAL:
        left, right = place.random(m, rows), place.random(rows, n, seed=1)
        total = torch.zeros(m, n, device=place.device)

        def product_and_add(left: torch.Tensor = left, right: torch.Tensor = right, total: torch.Tensor = total) -> None:
            made = torch.mm(left, right, out_dtype=torch.float32) if left.is_cuda else torch.mm(left.float(), right.float())
            total.add_(made)

        def in_place(left: torch.Tensor = left, right: torch.Tensor = right, total: torch.Tensor = total) -> None:
            sums.add_mm(total, left, right)

        case = f"{m} x {n}, {rows} rows"
        yield Finding(case, "seconds in place, beside product and add", seconds(place, in_place), seconds(place, product_and_add))
        total.fill_(1)
        in_place()
        few = slice(0, 64)
        truth = 1 + left[few].double() @ right.double()
        plain = 1 + left[few].float() @ right.float()
        yield Finding(case, "distance to float64", distance(total[few], truth), distance(plain, truth))
