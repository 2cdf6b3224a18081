"""Decoders written by hand, each in a style of its own. All are tiny; `forward` takes ids and labels and returns a loss."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from tests.support.decoders.fused import BooleanMask, CausalHeads, FusedQKV, GivenMask, Grouped, PaddingMask, Plain
from tests.support.decoders.layouts import NanoGPT, TimeFirst, Unbatched
from tests.support.decoders.open import Bidirectional, BidirectionalSpelled, CrossAttention
from tests.support.decoders.parts import HEAD, HEADS, VOCABULARY, WIDTH, Decoder, Heads, SwiGLU, made
from tests.support.decoders.rotary import ComplexRope, HalfRope
from tests.support.decoders.spelled import AdditiveTriangle, Alibi, Einsum, Softcap, SpelledHeads, Triangle, TrilBuffer
from tests.support.decoders.windows import FusedWindow, Window, WindowHeads

__all__ = [
    "CAUSAL",
    "HEAD",
    "HEADS",
    "OPEN",
    "VOCABULARY",
    "WIDTH",
    "WINDOWED",
    "AdditiveTriangle",
    "Alibi",
    "Bidirectional",
    "BidirectionalSpelled",
    "BooleanMask",
    "CausalHeads",
    "ComplexRope",
    "CrossAttention",
    "Decoder",
    "Einsum",
    "FusedQKV",
    "FusedWindow",
    "GivenMask",
    "Grouped",
    "HalfRope",
    "Heads",
    "NanoGPT",
    "PaddingMask",
    "Plain",
    "Softcap",
    "SpelledHeads",
    "SwiGLU",
    "TimeFirst",
    "Triangle",
    "TrilBuffer",
    "Unbatched",
    "Window",
    "WindowHeads",
    "made",
]


CAUSAL: dict[str, Callable[[], nn.Module]] = {
    "plain": Plain,
    "fused_qkv": FusedQKV,
    "grouped": Grouped,
    "boolean_mask": BooleanMask,
    "triangle": Triangle,
    "additive_triangle": AdditiveTriangle,
    "alibi": Alibi,
    "softcap": Softcap,
    "einsum": Einsum,
    "complex_rope": ComplexRope,
    "half_rope": HalfRope,
    "tril_buffer": TrilBuffer,
}
WINDOWED: dict[str, Callable[[], nn.Module]] = {"window": Window, "fused_window": FusedWindow}
OPEN: dict[str, Callable[[], nn.Module]] = {
    "bidirectional": Bidirectional,
    "bidirectional_spelled": BidirectionalSpelled,
}
