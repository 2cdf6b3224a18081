"""What a compiled model returns lies in memory as eager's results do: code outside may view it."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support import decoders
from tests.support.decoders.parts import loss_of
from tests.support.twins import batch


class ReturnsHeads(decoders.Decoder):
    """Heads beside the loss: what loops stack is dense, and what eager returns is a transposed view."""

    attention = decoders.CausalHeads

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        x = self.hidden(self.embed(ids))
        heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
        return loss_of(self.head(x), labels), heads, x.permute(2, 0, 1)


def test_results_have_eagers_strides() -> None:
    model = decoders.made(ReturnsHeads)
    inputs = batch()
    wanted = model(**inputs)
    for own, eager in zip(torch.compile(model, backend="streambp", options={"chunk_size": 5})(**inputs), wanted, strict=True):
        torch.testing.assert_close(own, eager)
        assert own.stride() == eager.stride()
