"""The plain decoder: fused attention that is causal by a flag."""

from __future__ import annotations

from tests.support.decoders.parts import Decoder, Heads

CausalHeads = Heads


class Plain(Decoder):
    attention = CausalHeads
