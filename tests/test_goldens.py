"""The product of each pass for four small decoders, as text."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from streamfx.ir.facts import Facts
from streamfx.options import Options
from streamfx.passes import pipeline
from streamfx.report.printer import PRODUCTS, text_of
from tests.support.goldens import file_name, orphans
from tests.support.small import EXAMPLES

Golden = Callable[[str], None]


@cache
def facts_of(example: str) -> Facts:
    return EXAMPLES[example].facts()


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("example", EXAMPLES)
def test_product(example: str, product: str, golden: Golden) -> None:
    golden(text_of(facts_of(example), product))


def test_every_pass_has_a_text() -> None:
    assert [step.name for step in pipeline(Options())] == list(PRODUCTS)


def test_text_is_the_same_each_time() -> None:
    first, second = EXAMPLES["causal"].facts(), EXAMPLES["causal"].facts()
    assert [text_of(first, product) for product in PRODUCTS] == [text_of(second, product) for product in PRODUCTS]


def test_every_golden_has_its_test(request: pytest.FixtureRequest) -> None:
    """Only a full run knows all tests."""
    if any("::" in argument for argument in request.config.args) or request.config.getoption("keyword"):
        pytest.skip("some tests were left out")
    collected = {item.path.name for item in request.session.items}
    assert not orphans(request.session.items), f"delete them, or bring their tests back (collected: {sorted(collected)})"


def test_a_golden_is_named_for_its_test() -> None:
    assert file_name("test_product[streams-axes]") == "product.streams.axes.txt"
