"""What each decoder of this gallery does when it is run: report, comparison with eager, a few steps of training."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import streamfx

VOCABULARY = 256
CHUNKS = {"chunk_size": 64, "loss_chunk_size": 64}  # small models: "auto" would not chunk them at all


def tokens(length: int = 512, batch: int = 2) -> Tensor:
    """Token ids [batch, length] with something to learn in them: a walk that repeats itself."""
    steps = torch.randint(-3, 4, (batch, length // 2)).repeat(1, 2)
    return steps.cumsum(1).remainder(VOCABULARY)


def show(model: nn.Module, *inputs: Tensor, steps: int = 5) -> None:
    """Print what streams in a decoder that returns its loss, hold its gradients against eager's, and train it."""
    print(streamfx.explain(model, *inputs, options=CHUNKS))
    print(streamfx.verify(model, *inputs, options=CHUNKS))
    compiled = torch.compile(model, backend="streambp", options=CHUNKS)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for step in range(steps):
        loss = compiled(*inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}  loss {loss.item():.4f}")
