"""The verifier finds what a pass has left wrong, and names the pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import fx

from streamfx.ir.facts import Facts
from streamfx.options import resolved
from streamfx.passes.verifier import BrokenProduct, Verifier
from tests.support.small import EXAMPLES

aten = torch.ops.aten


def product_of(facts: Facts) -> fx.Node:
    return next(node for node in facts.joint.graph.nodes if node.target is aten.mm.default)


def used_before_it_is_made(facts: Facts) -> Facts:
    node = product_of(facts)
    next(iter(facts.joint.graph.nodes)).append(node)
    return facts


def said_to_be_longer(facts: Facts) -> Facts:
    node = product_of(facts)
    left = node.args[0]
    with facts.joint.graph.inserting_before(node):
        shorter = facts.joint.graph.call_function(aten.slice.Tensor, (left, 0, 0, 1))
    shorter.meta = dict(left.meta)  # type: ignore[union-attr]
    node.replace_input_with(left, shorter)  # type: ignore[arg-type]
    return facts


def about_another_graph(facts: Facts) -> Facts:
    stranger = fx.Graph().placeholder("stranger")
    axes = facts.axes
    return replace(facts, found_axes=replace(axes, shapes={**axes.shapes, stranger: ()}))


FAULTS: dict[str, Callable[[Facts], Facts]] = {
    "was used before it has been defined": used_before_it_is_made,
    "slice": said_to_be_longer,
    "axes are about stranger": about_another_graph,
}


@pytest.mark.parametrize("found", FAULTS)
def test_a_fault_is_found_once(found: str) -> None:
    assert resolved().check_passes  # it is on while tests run
    facts = EXAMPLES["causal"].facts()
    verifier = Verifier.of(facts.joint.graph)
    verifier.check("nothing", facts)
    with pytest.raises(BrokenProduct, match=f"after breaking: .*{found}"):
        verifier.check("breaking", broken := FAULTS[found](facts))
    if found == "slice":
        verifier.check("another", broken)
