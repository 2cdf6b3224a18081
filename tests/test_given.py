"""Calls of which little can be said: a single row."""

from __future__ import annotations

import torch

from tests.support.small import Causal, tokens
from tests.test_explain import summary_of


def test_a_single_row_is_named_as_what_it_is() -> None:
    """No larger part of the model would help."""
    (stage,) = summary_of(Causal(), tokens(1, 1), tokens(1, 1))["stages"]
    assert "the inputs are a single row" in stage["reason"] and "give sequences of more rows" in stage["reason"]
    (stage,) = summary_of(lambda x: x.softmax(-1) * 2, torch.randn(1, 4, requires_grad=True))["stages"]
    assert "the inputs are a single row" in stage["reason"]
    (stage,) = summary_of(lambda x: x.sort(0).values * 2, torch.randn(4, requires_grad=True))["stages"]
    assert "single row" not in stage["reason"]
