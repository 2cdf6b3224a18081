"""The ones that drive a gradient in the forward half, and the products that scale it in the backward half.

Operators that are written after their axes and forms have been found come with these facts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from streamfx.ir.axes import Dim
from streamfx.ir.facts import AxisFacts, DemandFacts, Facts, Form, Role, Shape
from streamfx.ir.signature import Letter, LetterShape, Signature
from streamfx.passes.building import GraphWriter
from streamfx.passes.row_numbers import size_arguments

aten = torch.ops.aten


def aligned(driver: Shape, gradient: Shape) -> tuple[int | None, ...] | None:
    """For each dimension of a gradient which one of its driver goes along, None for a new one; None where that is not so.

    Dimensions are resolved, and those of size one have no axes.
    """
    held = {atom for dim in driver for atom in dim}
    places = {dim: i for i, dim in enumerate(driver) if dim}
    found = tuple(places.get(dim) for dim in gradient)
    along = [place for place in found if place is not None]
    are_whole = all(place is not None or held.isdisjoint(dim) for place, dim in zip(found, gradient, strict=True))
    return found if are_whole and along == sorted(places.values()) else None


class Scaling:
    """Writes into a joint graph; `axes` and `demand` then know what was written."""

    def __init__(self, facts: Facts) -> None:
        assert facts.axes is not None and facts.demand is not None
        self.axes: AxisFacts = replace(
            facts.axes,
            shapes=dict(facts.axes.shapes),
            results=dict(facts.axes.results),
            signatures=dict(facts.axes.signatures),
            letters=dict(facts.axes.letters),
        )
        self.demand: DemandFacts = replace(facts.demand, roles=dict(facts.demand.roles), forms=dict(facts.demand.forms))
        self.writer = GraphWriter(facts.joint.graph)

    def ones_like(self, driver: fx.Node, before: fx.Node) -> list[fx.Node]:
        """Ones of a driver's shape, made of nothing else of it; they come last."""
        value, point = driver.meta["val"], self.writer.before(before)
        sizes = size_arguments(driver, point)
        numbers = [size for size in sizes if isinstance(size, fx.Node)]
        for number in numbers:
            self.demand.forms[number] = (Form.SCALAR,)  # type: ignore[index]
        made = point.call(aten.full.default, sizes, 1.0, dtype=value.dtype, device=value.device)
        return [*numbers, self._known(made, (), self.shape(driver))]

    def product(self, gradient: fx.Node, driver: fx.Node) -> list[fx.Node]:
        """The gradient times its driver, in the gradient's type; what is handed on comes last."""
        point, shape = self.writer.before(gradient.next), self.shape(gradient)
        made = self._factor(driver, shape)
        factor = made[-1] if made else driver
        product = point.call(aten.mul.Tensor, gradient, factor)
        made.append(self._known(product, (shape, self.shape(factor)), shape))
        if product.meta["val"].dtype != gradient.meta["val"].dtype:
            cast = point.call(aten._to_copy.default, product, dtype=gradient.meta["val"].dtype)
            made.append(self._known(cast, (shape,), shape))
        return made

    def _factor(self, driver: fx.Node, shape: Shape) -> list[fx.Node]:
        """The driver with a dimension where the gradient has its axes, and of size one elsewhere; nothing for a plain number."""
        made: list[fx.Node] = []
        own = self.shape(driver)
        along = aligned(own, shape)
        assert along is not None
        if singles := [i for i, dim in enumerate(own) if not dim]:
            squeezed = tuple(dim for dim in own if dim)
            made.append(self._known(self.writer.call(aten.squeeze.dims, driver, singles), (own,), squeezed))
            own = squeezed
        for i, place in enumerate(along) if own else ():
            if place is None:
                wide = (*own[:i], (), *own[i:])
                made.append(self._known(self.writer.call(aten.unsqueeze.default, made[-1] if made else driver, i), (own,), wide))
                own = wide
        return made

    def shape(self, node: fx.Node) -> Shape:
        return tuple(self.axes.table.resolve(dim) for dim in self.axes.shapes[node])

    def _known(self, node: fx.Node, operands: Sequence[Shape], shape: Shape) -> fx.Node:
        """The node, with its facts: where operands and the result have the same dimension, it runs along it."""
        letters: dict[Letter, Dim] = dict(enumerate(shape))
        results: LetterShape = tuple((i,) if dim else () for i, dim in letters.items())
        signature = Signature(tuple(self._letters(operand, shape) for operand in operands), (results,))
        self.axes.shapes[node], self.axes.results[node] = shape, (shape,)  # type: ignore[index]
        self.axes.signatures[node], self.axes.letters[node] = signature, letters  # type: ignore[index]
        dims = self.axes.sequence_dims(shape)
        self.demand.roles[node] = dict.fromkeys(dims, Role.ROWS)  # type: ignore[index]
        self.demand.forms[node] = (Form.ROWS if dims else Form.SCALAR,)  # type: ignore[index]
        return node

    def _letters(self, operand: Shape, result: Shape) -> LetterShape:
        """The result's letters of an operand's dimensions: those at the same places, or those that are not of size one in order."""
        if len(operand) == len(result):
            return tuple((i,) if dim else () for i, dim in enumerate(operand))
        wide = iter([i for i, dim in enumerate(result) if dim])
        return tuple((next(wide),) if dim else () for dim in operand)
