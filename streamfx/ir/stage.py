"""Stages: segments of the joint graph, cut where few bytes are live. Each runs in loops over chunks of the sequence."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx


@dataclass(frozen=True)
class Stage:
    """A segment of the forward graph, and the segment of the backward graph that differentiates it.

    `outputs` are the forward values that later stages (or the caller) use, `gradients` the values that the backward
    segments of earlier stages use. `gradient_in_forward` marks a loss stage that computes its gradient together with the
    loss.
    """

    name: str
    forward: tuple[fx.Node, ...]
    backward: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    gradients: tuple[fx.Node, ...]
    gradient_in_forward: bool = False
