"""The verifier finds what a pass has left wrong, and names the pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from streamfx.ir.facts import Facts
from streamfx.options import resolved
from streamfx.passes.verifier import BrokenProductError, Verifier
from tests.support.small import EXAMPLES

aten = torch.ops.aten


def product_of(facts: Facts, target: Any) -> fx.Node:
    return next(node for node in facts.joint.graph.nodes if node.target is target)


def used_before_it_is_made(facts: Facts) -> Facts:
    node = product_of(facts, aten.mm.default)
    next(iter(facts.joint.graph.nodes)).append(node)
    return facts


def said_to_be_longer(facts: Facts) -> Facts:
    node = product_of(facts, aten.mm.default)
    node.args = (node.args[0], node.args[1], *node.args[2:])
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
def test_a_fault_is_found(found: str) -> None:
    facts = EXAMPLES["causal"].facts()
    verifier = Verifier.of(facts.joint.graph)
    verifier.check("nothing", facts)
    with pytest.raises(BrokenProductError, match=f"after breaking: .*{found}"):
        verifier.check("breaking", FAULTS[found](facts))


def test_what_was_checked_is_not_checked_again() -> None:
    facts = EXAMPLES["causal"].facts()
    verifier = Verifier.of(facts.joint.graph)
    said_to_be_longer(facts)
    with pytest.raises(BrokenProductError):
        verifier.check("breaking", facts)
    verifier.check("another", facts)


def test_it_is_on_while_tests_run() -> None:
    assert resolved().check_passes
