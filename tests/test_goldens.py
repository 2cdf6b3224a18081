"""The product of each pass for four small decoders, as text."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import fx

from streamfx.ir.facts import Facts
from streamfx.options import Options, resolve_options
from streamfx.passes import Fixpoint, pipeline
from streamfx.passes.faults import OPTIONAL_PASSES, SKIPPED_LAST
from streamfx.passes.verifier import InconsistentFactsError, Verifier
from streamfx.tools.report.printer import PRODUCTS
from tests.support.goldens import orphans
from tests.support.small import EXAMPLES

pytestmark = pytest.mark.compiled

Golden = Callable[[str], None]


@cache
def texts_of(example: str) -> dict[str, str]:
    return EXAMPLES[example].texts()


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("example", EXAMPLES)
def test_product(example: str, product: str, golden: Golden) -> None:
    golden(texts_of(example)[product])


def test_every_pass_is_named_as_its_file() -> None:
    """`faults.py` skips passes by these names."""
    passes = [
        one
        for each in pipeline(Options())
        for one in ((each.analysis, *each.rewrites) if isinstance(each, Fixpoint) else (each,))
    ]
    assert [one.name for one in passes] == [type(one).__module__.rpartition(".")[2] for one in passes]
    assert OPTIONAL_PASSES | {*SKIPPED_LAST} <= {one.name for one in passes}


def test_every_pass_has_a_text_of_its_own_each_time() -> None:
    assert [step.name for step in pipeline(Options())] == list(PRODUCTS)
    for example in EXAMPLES:
        assert len(set(texts_of(example).values())) == len(PRODUCTS)
    assert EXAMPLES["causal"].texts() == texts_of("causal")


def test_every_golden_has_its_test(request: pytest.FixtureRequest) -> None:
    """Only a full run knows all tests."""
    if any(".py" in argument for argument in request.config.args) or request.config.getoption("keyword"):
        pytest.skip("some tests were left out")
    collected = {item.path.name for item in request.session.items}
    assert not orphans(request.session.items), f"delete them, or bring their tests back (collected: {sorted(collected)})"


# -- the verifier finds an inconsistent result, and names the pass


def product_of(facts: Facts) -> fx.Node:
    return next(node for node in facts.joint.graph.nodes if node.target is torch.ops.aten.mm.default)


def used_before_it_is_made(facts: Facts) -> Facts:
    node = product_of(facts)
    next(iter(facts.joint.graph.nodes)).append(node)
    return facts


def said_to_be_longer(facts: Facts) -> Facts:
    node = product_of(facts)
    left = node.args[0]
    with facts.joint.graph.inserting_before(node):
        shorter = facts.joint.graph.call_function(torch.ops.aten.slice.Tensor, (left, 0, 0, 1))
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
    "axes refer to stranger": about_another_graph,
}


@pytest.mark.parametrize("found", FAULTS)
def test_a_fault_is_found_once(found: str) -> None:
    assert resolve_options().check_passes  # it is on while tests run
    facts = EXAMPLES["causal"].facts()
    verifier = Verifier.of(facts.joint.graph)
    verifier.check("nothing", facts)
    with pytest.raises(InconsistentFactsError, match=f"after breaking: .*{found}"):
        verifier.check("breaking", broken := FAULTS[found](facts))
    if found == "slice":
        verifier.check("another", broken)
