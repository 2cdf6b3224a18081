"""Gradients of experts' weights, added to a float32 total in place, against a product of all experts that is added."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.gpu import Finding, Place
from benchmarks.gpu.measures import distance, seconds
from streamfx.runtime import experts, sums

REAL = (
    (32, 2880, 5760, 32768),
    (128, 2048, 1536, 32768),
)  # GPT-OSS-20B's, Qwen3-30B-A3B's: experts, their weight, and rows of a chunk
SMALL = ((4, 32, 48, 64),)
FEW = 4  # experts that are compared with float64
UNEVEN = 2.0  # how many times more rows the last experts have than if all had as many; the first have none


def added_by_group(place: Place) -> Iterator[Finding]:
    """Who adds; time of it and of the products with weights, beside PyTorch's; distance to float64's."""
    for count, height, width, rows in SMALL if place.small else REAL:
        case = f"{count} experts, {height} x {width}, {rows} rows"
        x, y, weight = place.random(rows, height), place.random(rows, width, seed=1), place.random(count, height, width, seed=2)
        group = (torch.linspace(1 - 1 / UNEVEN, 1, rows + 1)[:-1] * count).long()[torch.randperm(rows)].to(place.device)
        order, ends = experts.arrange(group, count)
        total = torch.ones(count, height, width, device=place.device)
        yield Finding(case, "adds in place", str(experts.adds_by_group(total, x, y)))
        experts.add_arranged_outer(total, x, y, order, ends)
        yield Finding(case, "distance to float64", *_distances(total, x, y, group))
        yield Finding(
            case,
            "seconds in place, beside product and add",
            seconds(place, lambda: experts.add_arranged_outer(total, x, y, order, ends)),  # noqa: B023
            seconds(place, lambda: _product_and_add(total, x, y, order, ends)),  # noqa: B023
        )
        yield Finding(case, "seconds of products with weights", seconds(place, _multiplying(x, weight, order, ends)))


def _product_and_add(total: Tensor, x: Tensor, y: Tensor, order: Tensor, ends: Tensor) -> None:
    if experts.has_kernel(x, y):
        total.add_(experts.arranged_outer(x, y, order, ends))
        return
    x, y = x[order], y[order]
    for own, (start, stop) in zip(total, experts._spans(ends), strict=True):
        sums.add_mm(own, x[start:stop].t(), y[start:stop])


def _multiplying(x: Tensor, weight: Tensor, order: Tensor, ends: Tensor) -> Callable[[], Tensor]:
    return lambda: experts.arranged_mm(x, weight, order, ends)


def _distances(total: Tensor, x: Tensor, y: Tensor, group: Tensor) -> tuple[float, float]:
    """Of the last experts, and of products in float32."""
    last = range(len(total) - FEW, len(total))
    truth = torch.stack([1 + x[group == number].double().t() @ y[group == number].double() for number in last])
    plain = torch.stack([1 + x[group == number].float().t() @ y[group == number].float() for number in last])
    return distance(total[-FEW:], truth), distance(plain, truth)
