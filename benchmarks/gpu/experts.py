"""Gradients of experts' weights, added to a float32 total in place, beside a product of all experts that is then added."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.gpu.measures import Finding, distance, is_off, seconds
from benchmarks.gpu.place import Place
from benchmarks.gpu.products import in_float32
from streamfx.kernels import grouped_mm

REAL = (
    (32, 2880, 5760, 32768),
    (128, 2048, 1536, 32768),
)  # GPT-OSS-20B's, Qwen3-30B-A3B's: experts, sizes of a weight, and rows of a chunk
SMALL = ((4, 32, 48, 64),)
FEW = 4  # experts that are compared with float64
UNEVEN = 2.0  # the last experts have so many times the rows of an even share; the first have none


def added_by_group(place: Place) -> Iterator[Finding]:
    """Rates of sums in place, of a product that is added, and of products with weights; distances to float64's."""
    for count, height, width, rows in SMALL if place.small else REAL:
        x, y, weight = place.random(rows, height), place.random(rows, width, seed=1), place.random(count, height, width, seed=2)
        share = torch.linspace(1 - 1 / UNEVEN, 1, rows + 1, device=place.device)[:-1]
        group = (share * count).long()[place.random(rows, dtype=torch.float32, seed=3).argsort()]
        order, ends = grouped_mm.arrange(group, count)
        total = torch.ones(count, height, width, device=place.device)
        grouped_mm.add_arranged_outer(total, x, y, order, ends)
        error, eager = _distances(total, x, y, group)
        times = _times(place, total, x, y, weight, order, ends)
        rates = {f"{name} TFLOP/s": 2 * rows * height * width / taken / 1e12 for name, taken in times.items()}
        figures = {**rates, "by group": grouped_mm.adds_by_group(total, x, y), "distance": error, "float32's": eager}
        yield Finding(f"{count} of {height} x {width}, {rows} rows", figures, is_off(error, eager))


def _times(place: Place, total: Tensor, x: Tensor, y: Tensor, weight: Tensor, order: Tensor, ends: Tensor) -> dict[str, float]:
    return {
        "added in place": seconds(place, lambda: grouped_mm.add_arranged_outer(total, x, y, order, ends)),
        "made and added": seconds(place, lambda: total.add_(grouped_mm.arranged_outer(x, y, order, ends))),
        "times weights": seconds(place, lambda: grouped_mm.arranged_mm(x, weight, order, ends)),
    }


def _distances(total: Tensor, x: Tensor, y: Tensor, group: Tensor) -> tuple[float, float]:
    """Of the last experts' sums, and of products in float32."""
    last = range(len(total) - FEW, len(total))
    truth = torch.stack([1 + x[group == number].double().t() @ y[group == number].double() for number in last])
    plain = torch.stack([1 + in_float32(x[group == number].t(), y[group == number]) for number in last])
    return distance(total[-FEW:], truth), distance(plain, truth)
