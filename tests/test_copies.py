"""Copies to and from the host, on a device that works later than the host asks: no race, and two inputs alive at most."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from streamfx.options import resolved
from streamfx.runtime import offload
from tests.support.exactness import Recorded, assert_small, compare, value_errors
from tests.support.stages import Layers, batch
from tests.support.streams import Device

LAYERS = 6


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    """A decoder, traced once for all tests."""
    (found,) = compare(Layers(LAYERS).double(), batch(), chunk_size=5).recorder.compilations
    return found


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    device.install(monkeypatch)
    return device


def run(recorded: Recorded, device: Device, **options: Any) -> None:
    """Both halves on the device; their results are eager's, in whatever order it works."""
    facts = recorded.facts_for(resolved({"outputs": "dense", "chunk_size": 5, "loss_chunk_size": 5, "offload": "inputs", **options}))
    assert facts.program is not None
    with device.watching():
        actual = recorded.streamed_values(facts.program)
    assert_small(value_errors(actual, recorded.joint_values(), recorded.joint_arguments[1]), 1e-12, str(options))


def test_two_inputs_are_alive_at_most(recorded: Recorded, device: Device) -> None:
    run(recorded, device, save="inputs")
    device.check()
    assert device.most_alive() == 2
