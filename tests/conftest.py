"""Set-up of all tests."""

from __future__ import annotations

import pytest

from tests.support.goldens import golden

__all__ = ["golden"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-goldens", action="store_true", help="write the golden files anew")
