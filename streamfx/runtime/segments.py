"""A stretch of a loop's body, compiled by Inductor once for all bodies that have the same one and for chunks of all lengths."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from streamfx.ir.structure import structure
from streamfx.log import log
from streamfx.runtime.forms import Family, Numbers, family_of, layout_of, packed, single
from streamfx.torch_private import compile_for_one_size, compile_for_sizes

Run = Callable[..., Sequence[Any]]
MOST_FORMS = 6  # of one stretch: with more shapes than that it is not compiled again
NOT_COMPILED = "a part of a loop's body runs without a compiler: Inductor failed (%s). The result is exact, the step is slower."


@dataclass(frozen=True)
class Form:
    """Code for inputs whose sizes belong to a family, and are of those that `holds` allows."""

    family: Family
    run: Run
    holds: Callable[[int], bool]

    def fits(self, numbers: Numbers) -> bool:
        n = self.family.member(numbers)
        return n is not None and (self.family.at is None or self.holds(n))


_forms: dict[Hashable, list[Form]] = {}


class Segment:
    """A stretch of a body; `several` says that chunks of more than one length are to come.

    If there are several, what comes first is interpreted, until two lengths are known: then one form is compiled for all. If
    there is one, a form is compiled for it, and a form for all lengths once another call brings another one.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.several = False
        self.structure = structure(module.graph)
        self._seen: dict[Hashable, Numbers] = {}

    def __call__(self, *given: Any) -> Sequence[Any]:
        inputs = [packed(value) for value in given]
        kinds, numbers = layout_of(inputs)
        forms = _forms.setdefault((self.structure, kinds), [])
        form = next((form for form in forms if form.fits(numbers)), None)
        if form is None and len(forms) < MOST_FORMS:
            form = self._new_form(kinds, numbers, inputs, forms)
            forms += [form] if form is not None else []
        if form is None:
            return self.module(*inputs)  # type: ignore[no-any-return]
        tensors = (value for value in inputs if isinstance(value, Tensor))
        return form.run(*tensors) if form.family.at is None else form.run(numbers[form.family.at], *tensors)

    def _new_form(self, kinds: Hashable, numbers: Numbers, inputs: Sequence[Any], forms: Sequence[Form]) -> Form | None:
        """Code for these sizes, and for all of the family that they make with others that were met before."""
        if self.several:
            first = self._seen.setdefault(kinds, numbers)
            if first == numbers:
                return None
            known = [first]
        else:
            known = [form.family.offsets for form in forms if form.family.at is None]
        families = (family_of(other, numbers) for other in known)
        family = next((found for found in families if found is not None), None)
        return compiled(self.module, family or single(numbers), numbers, inputs)


def compiled(module: fx.GraphModule, family: Family, numbers: Numbers, inputs: Sequence[Any]) -> Form:
    """A stretch compiled for a family of sizes; where its code would hold for too few of them, for these sizes alone."""
    graph = graph_for(module, family, inputs)
    try:
        if family.at is None:
            return Form(family, compile_for_one_size(graph, [value for value in inputs if isinstance(value, Tensor)]), any_size)
        run, holds = compile_for_sizes(graph, numbers[family.at], lambda n: shapes_for(family, n, inputs))
    except Exception as error:
        if not _told:
            log.warning(NOT_COMPILED, error, exc_info=log.isEnabledFor(logging.DEBUG))
            _told.append(True)
        return Form(family, graph, any_size)
    form = Form(family, run, holds)
    return form if form.fits(numbers) else compiled(module, single(numbers), numbers, inputs)


_told: list[bool] = []


def any_size(n: int) -> bool:
    return True


def shapes_for(family: Family, n: Any, inputs: Sequence[Any]) -> list[tuple[list[Any], list[Any], Tensor]]:
    """Sizes and strides of each tensor among the inputs for some n, a number or a symbol."""
    numbers = iter([slope * n + offset if slope else offset for slope, offset in zip(family.slopes, family.offsets, strict=True)])
    found = []
    for value in inputs:
        if isinstance(value, Tensor):
            found.append(([next(numbers) for _ in value.shape], [next(numbers) for _ in value.shape], value))
        else:
            next(numbers)
    return found


def graph_for(module: fx.GraphModule, family: Family, inputs: Sequence[Any]) -> fx.GraphModule:
    """The stretch as a function of n and of tensors: the other numbers follow from n, or are constants."""
    graph = fx.Graph()
    n = None if family.at is None else graph.placeholder("n")
    copies: dict[fx.Node, Any] = {}
    position = 0
    for node, value in zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True):
        if isinstance(value, Tensor):
            copies[node], position = graph.placeholder(node.name), position + 2 * value.dim()
            continue
        slope, copies[node], position = family.slopes[position], family.offsets[position], position + 1
        if slope:
            product = graph.call_function(operator.mul, (n, slope))
            copies[node] = graph.call_function(operator.add, (product, copies[node]))
    for node in module.graph.nodes:
        if node.op == "call_function":
            copies[node] = graph.node_copy(node, lambda source: copies[source])
    results = module.graph.output_node().args[0]
    graph.output(tuple(copies[node] for node in results))  # type: ignore[index,union-attr]
    return fx.GraphModule(torch.nn.Module(), graph)
