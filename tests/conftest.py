"""Set-up of all tests."""

from __future__ import annotations

import logging

import pytest
import torch

from tests.support.goldens import golden

__all__ = ["golden"]

torch.set_num_threads(1)
# pytest listens to loggers that do not propagate, and with a listener torch writes a trace of all that it compiles
logging.getLogger("torch.__trace").propagate = True


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-goldens", action="store_true", help="write the golden files anew")
