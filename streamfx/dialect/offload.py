"""Copies of values between a device and the host's memory, where they wait for the backward graph.

    to_host(value) -> held                    a copy of the value on the host
    from_host(held, device) -> value          a copy of the held value on the device

Both operators only begin the copy. `runtime/offload.py` has the functions that wait for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from streamfx.dialect.declare import declare


def _fake_to_host(value: Tensor) -> Tensor:
    return torch.empty_like(value, device="cpu")


def _fake_from_host(held: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(held, device=device)


to_host = declare("to_host(Tensor value) -> Tensor", _fake_to_host)
from_host = declare("from_host(Tensor held, Device device) -> Tensor", _fake_from_host)
