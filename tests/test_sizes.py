"""Amounts of memory as text or numbers: valid forms parse exactly, others raise."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import streamfx
from streamfx.budget import UNITS, budget_bytes, format_bytes, is_budget, parse_amount, total_memory
from streamfx.options import resolve_options

CPU = torch.device("cpu")
SPACES = st.text(" \t", max_size=2)


@given(st.data(), st.integers(1, 1 << 70), st.sampled_from(sorted(UNITS)))
def test_every_unit_parses_exactly(data: st.DataObject, number: int, unit: str) -> None:
    written = "".join(data.draw(st.sampled_from((letter.lower(), letter.upper()))) for letter in unit)
    text = "".join((data.draw(SPACES), str(number), data.draw(SPACES), written, data.draw(SPACES)))
    assert parse_amount(text) == budget_bytes(text, CPU) == number * UNITS[unit] and isinstance(parse_amount(text), int)
    assert resolve_options({"memory_budget": text}).memory_budget == text


@given(st.integers(1, 1 << 60))
def test_printed_sizes_parse_back(size: int) -> None:
    amount = parse_amount(format_bytes(size))
    assert isinstance(amount, int) and abs(amount - size) <= size / 20


@given(st.integers(1, 10000))
def test_percentages_equal_fractions(hundredths: int) -> None:
    share, written = hundredths / 10000, f"{hundredths // 100}.{hundredths % 100:02}"
    shares = [parse_amount(share), parse_amount(f"{written}%"), parse_amount(f"{written} %"), parse_amount(f"{share:.4f}")]
    assert shares == [share] * 4 and all(isinstance(item, float) for item in shares)
    assert budget_bytes(f"{written}%", CPU) == int(share * total_memory(CPU))


TEXTS = ("", "G", "-1G", "24 X", "24GiBi", "24i", "1,5G", "0", "0GiB", "0%", "101%", "1.5", "0.0", "nan", "inf", "1e9", "٣G")


@pytest.mark.parametrize("value", [*TEXTS, 0, -1, 0.0, 1.5, -0.5, float("nan"), float("inf"), True, (), b"24G"])
def test_invalid_amounts_are_refused(value: Any) -> None:
    assert parse_amount(value) is None and not is_budget(value)
    with pytest.raises(streamfx.OptionError, match="24G") as error:
        streamfx.configure(memory_budget=value)
    assert repr(value) in str(error.value)
    with pytest.raises(streamfx.PlanError, match="memory cannot be"):
        streamfx.plan("Qwen3-8B", memory=value)


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, Fraction])
def test_numbers_of_any_type_are_shares(kind: Any) -> None:
    assert is_budget(kind(0.5)) and not is_budget(kind(1.5))
    for asked in (streamfx.Options(memory_budget=kind(0.5)), resolve_options({"memory_budget": kind(0.5)})):
        assert asked.memory_budget == 0.5 and type(asked.memory_budget) is float


@given(st.text(max_size=12))
def test_any_text_parses_to_an_amount_or_none(text: str) -> None:
    amount = parse_amount(text)
    assert amount is None or amount > 0
    assert is_budget(text) == (amount is not None or text == "auto")


@pytest.mark.parametrize("value", ["90%", 0.9, "auto"])
def test_host_memory_must_be_bytes(value: Any) -> None:
    with pytest.raises(streamfx.PlanError, match="host_memory cannot be"):
        streamfx.plan("Qwen3-8B", host_memory=value)
