"""Products of bfloat16: how fast they are, and what it costs to add one to a float32 total, as gradients of weights are."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.gpu.measures import Finding, distance, is_off, seconds
from benchmarks.gpu.place import Place
from streamfx.kernels import accumulate

REAL = (
    (4096, 12288, 4096),
    (4096, 151936, 2048),
    (4096, 4096, 4096),
)  # Qwen3-8B's MLP, head and attention: a weight's sizes, and rows of a chunk
SMALL = ((32, 48, 16),)
FEW = 64  # lines of the total that are compared with float64


def accumulation(place: Place) -> Iterator[Finding]:
    """Rates of the product alone, added in place, and made in float32 and then added; the total's distance to float64's."""
    for m, n, rows in SMALL if place.small else REAL:
        left, right = place.random(m, rows), place.random(rows, n, seed=1)
        total = torch.zeros(m, n, device=place.device)
        times = _times(place, left, right, total)
        error, eager = _distances(left, right, total)
        rates = {f"{name} TFLOP/s": 2 * m * n * rows / taken / 1e12 for name, taken in times.items()}
        figures = {**rates, "distance": error, "float32's": eager}
        yield Finding(f"{m} x {n}, {rows} rows", figures, is_off(error, eager))


def _times(place: Place, left: Tensor, right: Tensor, total: Tensor) -> dict[str, float]:
    def product_and_add() -> None:
        total.add_(in_float32(left, right))

    made = torch.empty_like(total, dtype=left.dtype)
    return {
        "product": seconds(place, lambda: torch.mm(left, right, out=made)),
        "added in place": seconds(place, lambda: accumulate.add_product(total, left, right, is_first=False)),
        "made and added": seconds(place, product_and_add),
    }


def _distances(left: Tensor, right: Tensor, total: Tensor) -> tuple[float, float]:
    """Of a total of ones after a product was added, and of the device's own product in float32 that is added to it."""
    total.fill_(1)
    accumulate.add_product(total, left, right, is_first=False)
    truth = 1 + left[:FEW].double() @ right.double()
    plain = 1 + in_float32(left[:FEW], right)
    return distance(total[:FEW], truth), distance(plain, truth)


def in_float32(left: Tensor, right: Tensor) -> Tensor:
    """The product with its sums in float32: on a GPU, those of tensor cores, which have fewer digits than float32's own."""
    return torch.mm(left, right, out_dtype=torch.float32) if left.is_cuda else torch.mm(left.float(), right.float())
