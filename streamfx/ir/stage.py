"""Stages: the joint graph, cut where little is alive."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx


@dataclass(frozen=True)
class Stage:
    """One stretch of the forward half and the stretch of the backward half that undoes it.

    `outputs` are the forward values that later stages (or the caller) use, `gradients` the values that earlier stages'
    backward stretches use. `gradient_in_forward` marks a loss stage whose gradient is found along with the loss.
    """

    name: str
    forward: tuple[fx.Node, ...]
    backward: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    gradients: tuple[fx.Node, ...]
    gradient_in_forward: bool = False
